"""The CUDA sources keep their rules: PTX in one header, no toolkit, no back end in a kernel, no atomics."""
import pathlib
import re
import sys

HEADERS = {"prelude.cuh", "ptx.cuh", "host.cuh", "table.cuh"}
PTX = "ptx.cuh"
KNOW_THE_BACK_END = {"prelude.cuh", "ptx.cuh"}
HOST_ONLY = {"host.cuh", "table.cuh", "host.cc"}  # never seen by NVRTC
SYSTEM = {("table.cuh", "utility")}


def code_of(text):
    """The text without comments, lines kept."""
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m.group().count("\n"), text, flags=re.S)
    return re.sub(r"//[^\n]*", "", text)


def faults_of(name, text):
    """(line, sentence) for each rule broken in the file of that name."""
    kernel = name.endswith(".cu")
    for number, line in enumerate(code_of(text).splitlines(), 1):
        if re.search(r"\b(asm|__asm__)\b", line) and name != PTX:
            yield number, f"inline PTX stands in {PTX} only"
        if include := re.match(r"\s*#\s*include\s*[<\"]([^>\"]+)[>\"]", line):
            file = include.group(1)
            if kernel or not (file in HEADERS or (name, file) in SYSTEM):
                yield number, f"{file} is included: kernels get the prelude and need no toolkit"
        if re.search(r"\batomic\w*\s*\(|\bred\.|\batom\.", line):
            yield number, "atomics: a sum's order would depend on timing"
        if name in HOST_ONLY:
            continue
        if re.search(r"__CUDACC|__CUDA_ARCH__|\bEMU_SCAN\b", line) and name not in KNOW_THE_BACK_END:
            yield number, "a kernel does not know on which back end it runs"
        if kernel and re.search(r"\bemu_\w+|\bEMU_\w+", line):
            yield number, "a kernel calls no function of the emulator"
        if kernel and re.search(r"\b__shared__\b|\b__global__\b", line):
            yield number, "kernels and shared arrays are declared by KERNEL, SHARED and DYNAMIC_SHARED"


PLANTED = [
    ("a.cu", 'asm volatile("nop;");'),
    ("prelude.cuh", "__asm__(\"nop;\");"),
    ("a.cu", "#include <cuda_fp16.h>"),
    ("ptx.cuh", "#include <cuda_bf16.h>"),
    ("a.cu", '#include "ptx.cuh"'),
    ("a.cu", "atomicAdd(&sum, x);"),
    ("ptx.cuh", 'asm("red.global.add.f32 [%0], %1;");'),
    ("a.cu", "#ifdef __CUDACC_RTC__"),
    ("a.cu", "#if __CUDA_ARCH__ >= 900"),
    ("a.cu", "emu_trap(0, 0);"),
    ("a.cu", "__shared__ float s[4];"),
    ("a.cu", 'extern "C" __global__ void f() {}'),
]
for name, text in PLANTED:
    if not list(faults_of(name, text)):
        sys.exit(f"cuda sources: the check does not see {text!r} in {name}")
if list(faults_of("a.cu", "// asm, atomicAdd( and __shared__ in a comment\nint x = 0;")):
    sys.exit("cuda sources: the check sees comments")

root = pathlib.Path(__file__).resolve().parent.parent / "kernels"
files = [f for d in ("cuda", "tests/emulated/kernels") for f in sorted((root / d).iterdir())]
found = [f"{f.relative_to(root)}:{n}: {why}" for f in files for n, why in faults_of(f.name, f.read_text())]
if found:
    sys.exit("\n".join(found))
print(f"cuda sources: {len(files)} files keep the rules")
