"""Recognition of models, to find measurements of their heads before they run."""
