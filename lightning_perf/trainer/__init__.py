"""The only rooms that read Lightning's Trainer."""
