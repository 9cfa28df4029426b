"""Starting workers, and moving their state."""
