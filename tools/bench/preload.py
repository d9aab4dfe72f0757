"""What every worker imports, imported once: the server that forks the workers loads this module (see processes.py).

Nothing here may start CUDA: a process that was forked after that cannot use it.
"""

import contextlib

import torch

from . import worker as worker

with contextlib.suppress(ImportError):  # a row that needs it then says "unavailable"
    from transformers import BertForMaskedLM, GPT2LMHeadModel, RobertaForMaskedLM  # noqa: F401

if torch.cuda.is_initialized():
    raise RuntimeError("an import of the benchmark's workers started CUDA; forked workers could not use it")
