"""What training says about itself."""
