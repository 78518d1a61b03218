"""Counts one training step of models beyond causal language models, in a real Trainer.

    PYTHONPATH=benchmarks python -m architectures             # all, with transformers installed
    PYTHONPATH=benchmarks python -m architectures --plain     # those in plain torch
    PYTHONPATH=benchmarks python -m architectures GAN U-Net   # by parts of their names

Prints, for each model, the FLOPs of a batch that lightning_perf reports for a training; what
torch's ``FlopCounterMode`` finds in the same forward and backward, as a share of them; what
explains the difference exactly; a count by hand from the calls of torch's functions (`ByHand`),
which knows nothing of operators and of the backward that runs; the operators that lightning_perf
names as not counted; and the formulas that accept the configuration, as shares. Exits with 1 if a
difference has no reason.
"""
