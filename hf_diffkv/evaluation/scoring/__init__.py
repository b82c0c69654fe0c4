"""How good an answer is: rules of public data sets, in plain Python and without downloads."""
