"""Training in rounds over the internet."""
