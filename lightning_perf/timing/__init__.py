"""Exclusive times of the host and times of the device: no Lightning."""
