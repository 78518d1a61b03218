"""Exclusive times on the host and times on the device. No Lightning."""
