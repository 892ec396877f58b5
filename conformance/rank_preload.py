"""Imported once by the server that rank processes are forked from, so that none pays for torch."""

import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.distributed.tensor.debug  # half a second, which each rank would spend after its call
import torch.distributed.tensor.parallel
import torch.optim  # noqa: F401
