"""In place of sgl_kernel on a GPU: SGLang imports it everywhere, and is set to run without.

Every name exists, nested ones (scalar_type.scalar_types.uint4b8) and modules too. The first one
that is called names the kernel that the engine could not do without. A module of SGLang's that
takes more than that, CUTLASS, is replaced where that is not installed: it serves newer GPUs alone.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from types import ModuleType


class _Missing:
    """A name that may be passed around and not be called."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.__name__ = name.rpartition(".")[2]
        self.__qualname__ = self.__name__

    def __getattr__(self, name: str) -> "_Missing":
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self._name}.{name}")

    def __call__(self, *_args: object, **_kwargs: object) -> None:
        raise NotImplementedError(f"{self._name} was called, and sgl_kernel is not installed")


class _Module(ModuleType):
    def __getattr__(self, name: str) -> _Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds any module below this package."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith(f"{__name__}.") and name not in _WITHOUT_CUTLASS:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave it as it is, but for what SGLang asks before it chooses a kernel."""
        for name in ("is_arch_support_pdl", "can_use_dual_gemm"):
            vars(module)[name] = lambda *_args: False


_WITHOUT_CUTLASS = (
    {"sglang.kernels.ops.gemm.cutedsl_dual_gemm"} if find_spec("cutlass") is None else set()
)
sys.meta_path.insert(0, _Finder())
__version__ = "0"


def __getattr__(name: str) -> _Missing:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Missing(f"{__name__}.{name}")
