"""The only package that reads Lightning's Trainer."""
