"""Compile the inner loops where there is a compiler; without one the package is pure Python.

They are compiled for this machine's processor; SPECULANT_MARCH=x86-64-v3 makes a wheel for any with
AVX2. The loader leaves a library out that asks for more than the processor has.
"""

import os

from setuptools import Extension, setup

MARCH = os.environ.get("SPECULANT_MARCH", "native")
FLAGS = ["-O3", f"-march={MARCH}", "-std=c++17", "-ffp-contract=fast", "-fno-math-errno"]
SOURCES = ["attention", "chain", "layers", "library", "linear", "tree"]
HEADERS = [
    "calls", "crosswise", "formats", "grouped", "largest", "parallel", "products", "rounded", "vectors",
]  # fmt: skip

setup(
    ext_modules=[
        Extension(
            "speculant._native",
            [f"src/speculant/native/{name}.cpp" for name in SOURCES],
            depends=[f"src/speculant/native/{name}.h" for name in HEADERS],
            extra_compile_args=FLAGS,
            language="c++",
            optional=True,
        )
    ]
)
