"""What is known of a model's heads before it runs."""
