"""Gives every Python process that has this folder on its path an emulated accelerator, if EMULATED_DEVICES is set.

Python imports a module of this name when it starts, so the ranks that `farspan run` starts have the devices, too. The
missing half of torch is put in place while torch is being imported: after its C++ half, before its `torch.cuda`.
"""

import importlib.abc
import os
import sys


class _AtImports(importlib.abc.MetaPathFinder):
    """Is asked for each module that is imported; only the moment matters, it finds nothing."""

    def find_spec(self, fullname, path, target=None):
        if fullname == "torch.cuda":
            from tests.emulated import torch_half

            torch_half.install()
        if fullname == "torch.distributed.distributed_c10d":
            from tests.emulated import torch_half

            torch_half.install_rest()


if os.environ.get("EMULATED_DEVICES"):
    sys.meta_path.insert(0, _AtImports())
