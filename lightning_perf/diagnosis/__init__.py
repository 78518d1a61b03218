"""Why a run is slow. Pure: no torch, no Lightning."""
