"""Networks whose features pictures are compared by, and where their weights are found."""
