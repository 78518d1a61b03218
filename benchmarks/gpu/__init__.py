"""Checks that need a GPU.

    PYTHONPATH=benchmarks python -m gpu                # all parts, under ten minutes
    PYTHONPATH=benchmarks python -m gpu mfu verdicts   # some; earlier rows of the others are kept
    PYTHONPATH=benchmarks python -m gpu --device cpu   # a dry run of the same code

It needs torch, lightning and this package's required dependencies, pytest and hypothesis; neither
MLflow nor memray, VizTracer, jsonargparse or wandb. Each part is a separate process, so that a
crash affects no other part. Rows are printed and written to ``results/gpu.json`` as they are
measured.
"""
