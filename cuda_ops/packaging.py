"""Builds the libraries into a wheel or an editable install, as far as compilers allow.

``CUDA_OPS=auto|cpu|cuda|off`` says what must be built; see cuda_ops/build.py. pyproject.toml names
these commands to setuptools, which loads this file by its path.
"""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parents[1].resolve()
sys.path.insert(0, str(ROOT))  # An isolated build does not see the package that it builds.

from cuda_ops.build import build_what_is_possible  # noqa: E402
from cuda_ops.sources import library_name  # noqa: E402


class BuildWithLibraries(build_py):
    """Builds next to the sources when editable, into the build folder otherwise."""

    def run(self) -> None:
        """Copy the Python files, then compile."""
        super().run()
        root = ROOT if self.editable_mode else Path(self.build_lib)
        for kind, outcome in build_what_is_possible(root / "cuda_ops" / "lib").items():
            sys.stderr.write(f"cuda_ops: {kind} {outcome}\n")


class WheelOfAPlatform(bdist_wheel):
    """The libraries fit any Python, but one platform."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tag: that of pure Python where nothing was compiled."""
        built = Path(str(self.bdist_dir)) / "cuda_ops" / "lib"
        if not any((built / library_name(kind)).is_file() for kind in ("cpu", "cuda")):
            return super().get_tag()
        self.root_is_pure = False
        *_, platform = super().get_tag()
        return "py3", "none", platform
