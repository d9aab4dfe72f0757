"""`memferry train`: a byte-level GPT, its data, loop, metrics, plots and checkpoints.

Everything here uses the engine the way any program would; the engine knows nothing of it.
"""
