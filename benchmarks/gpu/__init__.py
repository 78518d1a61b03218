"""Checks on a GPU: what no machine without one can show.

    PYTHONPATH=benchmarks python -m gpu                # all parts, under ten minutes
    PYTHONPATH=benchmarks python -m gpu mfu verdicts   # some of them
    PYTHONPATH=benchmarks python -m gpu --device cpu   # a dry run of the same code

It needs torch, lightning and this package's required dependencies, pytest and hypothesis; neither
MLflow nor memray, VizTracer, jsonargparse or wandb. Each part is a process of its own, so that none
can take another with it. Rows are printed and written to ``results/gpu.json`` as they come.
"""
