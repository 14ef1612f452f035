"""The gate of the CUDA kernels, without a GPU: NVRTC compiles them, and what its assembler reports must be golden.

    python3 .ci/gate.py                compiles what is listed and compares it with .ci/gate.txt
    python3 .ci/gate.py add gelu       the same of these files alone
    python3 .ci/gate.py --write        rewrites .ci/gate.txt, or of it the files named too, for a person to judge the difference

NVRTC is exactly that of VERSION, from PyPI, in target/nvrtc (.ci/run makes it). Each listed kernel is compiled alone, as
it is when it is first launched, for at most SECONDS of processor time; on a machine that others hold up, which a file that
should take YARD seconds tells, for as many times longer. Registers, spilled bytes, stack and static shared
memory are the assembler's; dynamic shared memory is the host's (checked against its specs by the unit test
gpu::golden). In the SASS of the tensor-core kernels there are LDSM and HMMA, LDGSTS of 16 bytes where rows are whole chunks,
and neither LDL nor STL: nothing of them lies in local memory. In tf32 there is no LDSM, which moves halves of its words, and LDGSTS
of 4 bytes too, for other rows. What is allowed to spill stands in EXCEPTIONS with its reason.

Not listed: attention in f64, which is there to be compared with and not to be fast; its sums alone are more registers
than there are. Attention in f32 is listed for sm_90 alone, its bf16 twin (unaligned rows) not. For sm_100 and sm_120
products are listed in one of their four forms, attention without the steps of a ring: the rest are the same code.
"""
import ctypes
import multiprocessing
import os
import pathlib
import re
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
CUDA = ROOT / "kernels" / "cuda"
TABLE = ROOT / ".ci" / "gate.txt"
VENV = pathlib.Path(os.environ.get("QUINTET_NVRTC_VENV", ROOT / "target" / "nvrtc"))
VERSION = (13, 0)
SECONDS = 3.0
# What is compiled to see how fast the machine is just now, and the seconds that it takes on a quiet one.
YARD = ("add", 80, 0.23)
ARCHS = [80, 90, 100, 120]
# Of a block, static and dynamic together (CUDA C++ Programming Guide).
SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
MATRIX = ["gemm_mma", "attention_mma"]
TF32 = "gemm_tf32"
# Compiled kernel by kernel, as all are when they are launched; a file of the others is compiled whole, for that
# takes no longer than one kernel of these.
ALONE = [*MATRIX, "attention_simt", "gemm_simt", TF32, "fold", "layer_norm", "rms_norm", "router"]
# (kernels, spilled bytes allowed, why)
EXCEPTIONS = [
    (r".*_f64(_.*)?", 64, "f64 is there to be compared with: its sums are twice the registers"),
    (r"grouped_nn_f32", 8, "ptxas keeps to 48 registers on sm_120, for five blocks a multiprocessor"),
]


def listed(module, kernel, arch):
    """Whether the kernel is compiled for the architecture."""
    if module == "attention_simt" and "_delta_" not in kernel and "_finish_" not in kernel:
        return arch == 90 and "_f32_" in kernel
    if module in MATRIX and arch > 90:
        return "_step" not in kernel and not re.match(r"gemm_(nn|tn|tt)", kernel)
    return True


class Nvrtc:
    """The library, by its C interface."""

    def __init__(self):
        found = sorted(VENV.glob("lib/python3*/site-packages/nvidia/*/lib/libnvrtc.so.*"))
        if not found:
            sys.exit(f"gate: no NVRTC in {VENV}: python3 -m venv {VENV}; {VENV}/bin/pip install nvidia-cuda-nvrtc==13.0.88")
        for builtins in found[0].parent.glob("libnvrtc-builtins.so.*"):
            ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
        self.lib = ctypes.CDLL(str(found[0]))
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.lib.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        if (major.value, minor.value) != VERSION:
            sys.exit(f"gate: NVRTC is {major.value}.{minor.value}, and the table is that of {VERSION[0]}.{VERSION[1]}")
        self.headers = {f.name: f.read_text() for f in [CUDA / "prelude.cuh", CUDA / "ptx.cuh"]}

    def text(self, program, what):
        size = ctypes.c_size_t()
        getattr(self.lib, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        out = ctypes.create_string_buffer(size.value)
        getattr(self.lib, f"nvrtcGet{what}")(program, out)
        return out.raw

    def compile(self, module, arch, defines):
        """(cubin, log, seconds of processor time)"""
        source = (CUDA / f"{module}.cu").read_text()
        strings = lambda texts: (ctypes.c_char_p * len(texts))(*[t.encode() for t in texts])
        program, names = ctypes.c_void_p(), list(self.headers)
        texts = [self.headers[name] for name in names]
        self.lib.nvrtcCreateProgram(ctypes.byref(program), source.encode(), f"{module}.cu".encode(), len(names),
                                    strings(texts), strings(names))
        options = [f"--gpu-architecture=sm_{arch}", "--std=c++17", "--pre-include=prelude.cuh", "--ptxas-options=-v", *defines]
        began = time.process_time()
        failed = self.lib.nvrtcCompileProgram(program, len(options), strings(options))
        seconds = time.process_time() - began
        log = self.text(program, "ProgramLog").decode(errors="replace").rstrip("\0")
        if failed:
            raise RuntimeError(f"{module}.cu for sm_{arch} with {defines}:\n{log}")
        cubin = self.text(program, "CUBIN")
        self.lib.nvrtcDestroyProgram(ctypes.byref(program))
        return cubin, log, seconds


def reports(log):
    """{kernel: {regs, spill, stack, static}} of what the assembler says with -v."""
    found, kernel, stack, spill = {}, None, 0, 0
    for line in log.splitlines():
        if entry := re.search(r"Compiling entry function '(\w+)'", line):
            kernel = entry[1]
        elif frame := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            stack, spill = int(frame[1]), max(int(frame[2]), int(frame[3]))
        elif used := re.search(r"Used (\d+) registers(.*)", line):
            static = re.search(r"(\d+) bytes smem", used[2])
            found[kernel] = {"regs": int(used[1]), "spill": spill, "stack": stack, "static": int(static[1]) if static else 0}
    return found


def names_of(nvrtc, module):
    """The kernels of a module: empty ones of their names are compiled."""
    log = nvrtc.compile(module, 80, ["-DNAME_KERNELS"])[1]
    return sorted(reports(log))


def sass_faults(module, kernel, cubin, folder):
    """What is wrong with the machine code of a tensor-core kernel."""
    path = folder / f"{kernel}.cubin"
    path.write_bytes(cubin)
    tool = next(VENV.glob("lib/python3*/site-packages/nvidia/*/bin/nvdisasm"))
    run = subprocess.run([tool, "-c", path], capture_output=True, text=True)
    path.unlink()
    if run.returncode:
        return [f"{kernel}: nvdisasm: {run.stderr.strip()}"]
    have = set(re.findall(r"\b(LDGSTS|LDSM|HMMA|LDL|STL)\b", run.stdout))
    wide = not kernel.endswith("_narrow")
    tf32 = module == TF32
    want = {"HMMA"} | ({"LDSM"} if not tf32 else set()) | ({"LDGSTS"} if wide else set())
    faults = [f"{kernel}: no {code} in its SASS" for code in sorted(want - have)]
    copies = set(re.findall(r"\bLDGSTS[\w.]*", run.stdout))
    narrow = {code for code in copies if "128" not in code.split(".")}
    if wide and copies == narrow:
        faults.append(f"{kernel}: no LDGSTS of 16 bytes in its SASS")
    if not tf32:
        faults += [f"{kernel}: {code} in its SASS: a copy of less than 16 bytes" for code in sorted(narrow)]
    local = have & {"LDL", "STL"} if not may_spill(kernel) else set()
    return faults + [f"{kernel}: {code} in its SASS: something lies in local memory" for code in sorted(local)]


def may_spill(kernel):
    """Bytes that the kernel may spill."""
    return max([bytes for pattern, bytes, _ in EXCEPTIONS if re.fullmatch(pattern, kernel)], default=0)


def held_up(nvrtc):
    """How many times as long as on a quiet machine a compilation takes just now; 1 on a quiet one."""
    module, arch, quiet = YARD
    return max(1.0, min(nvrtc.compile(module, arch, [])[2] for _ in range(3)) / quiet)


def defines_of(kernel):
    """The defines by which a kernel is compiled alone, or its file whole where there is none."""
    return ["-DONE_KERNEL", f"-DWANT_{kernel}=~, KERNEL_EMIT"] if kernel else []


def seconds_alone(nvrtc, job, seconds):
    """Of a job that took `seconds`, too long: how long it takes with nothing else of ours beside it. Processor time holds
    what a sibling core and the host of a virtual machine take from it, so one long time proves nothing."""
    module, arch, kernel = job
    for _ in range(3):
        if seconds > SECONDS:
            before = held_up(nvrtc)
            took = nvrtc.compile(module, arch, defines_of(kernel))[2]
            seconds = min(seconds, took / min(before, held_up(nvrtc)))
    return seconds


def judge(job):
    """Compiles one job: (rows, faults, seconds, what)."""
    module, arch, kernel = job
    nvrtc = Nvrtc()
    cubin, log, seconds = nvrtc.compile(module, arch, defines_of(kernel))
    found, faults = reports(log), []
    if kernel and list(found) != [kernel]:
        faults.append(f"{module}: {kernel} alone was wanted and {list(found)} came")
    for name, report in found.items():
        allowed = may_spill(name)
        if report["spill"] > allowed:
            faults.append(f"{name} for sm_{arch} spills {report['spill']} bytes, and {allowed} are allowed")
    if module in [*MATRIX, TF32]:
        folder = pathlib.Path(os.environ["QUINTET_GATE_FOLDER"])
        faults += [f"sm_{arch} {fault}" for fault in sass_faults(module, kernel, cubin, folder)]
    return [(module, arch, name, report) for name, report in found.items()], faults, seconds, (module, arch, kernel)


def read_table():
    """{(module, kernel): (static, dynamic, {arch: "regs spill stack"})}"""
    table = {}
    for line in TABLE.read_text().splitlines() if TABLE.exists() else []:
        if line and not line.startswith("#"):
            module, kernel, static, dynamic, *cells = line.split()
            table[module, kernel] = (int(static), int(dynamic), dict(zip(ARCHS, cells)))
    return table


HEAD = """\
# What the assembler of NVRTC 13.0.88 makes of the listed kernels (.ci/gate.py): bytes of static and dynamic shared memory,
# then for sm_80, sm_90, sm_100 and sm_120 registers/spilled bytes/stack bytes; - where a kernel is not listed.
"""


def dynamic_of(module, kernel):
    """Of a kernel that is not in the table yet; gpu::golden says what is right."""
    known = read_table().get((module, kernel))
    return known[1] if known else 0


def main():
    import tempfile
    write, only = "--write" in sys.argv, [word for word in sys.argv[1:] if word != "--write"]
    began = time.time()
    nvrtc = Nvrtc()
    jobs = []
    for file in [f for f in sorted(CUDA.glob("*.cu")) if not only or f.stem in only]:
        module, alone = file.stem, file.stem in ALONE
        names = names_of(nvrtc, module)
        for arch in ARCHS:
            jobs += [(module, arch, n) for n in names if listed(module, n, arch)] if alone else [(module, arch, None)]
    rows, faults, slowest = {}, [], []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["QUINTET_GATE_FOLDER"] = folder
        with multiprocessing.Pool(os.cpu_count()) as pool:
            for found, wrong, seconds, what in pool.imap_unordered(judge, jobs, chunksize=1):
                faults += wrong
                slowest.append((seconds, what))
                for module, arch, kernel, report in found:
                    rows.setdefault((module, kernel), {})[arch] = report
    lines = []
    for (module, kernel), by_arch in sorted(rows.items()):
        static, dynamic = max(r["static"] for r in by_arch.values()), dynamic_of(module, kernel)
        for arch in by_arch:
            if static + dynamic > SHARED[arch]:
                faults.append(f"{kernel}: {static + dynamic} bytes of shared memory, and sm_{arch} has {SHARED[arch]}")
        cell = lambda r: f"{r['regs']}/{r['spill']}/{r['stack']}" if r else "-"
        cells = " ".join(f"{cell(by_arch.get(arch)):>9}" for arch in ARCHS)
        lines.append(f"{module:<14} {kernel:<40} {static:>6} {dynamic:>6} {cells}")
    all_golden = [line for line in TABLE.read_text().splitlines() if line[0] != "#"] if TABLE.exists() else []
    golden = [line for line in all_golden if not only or line.split()[0] in only]
    if write:
        TABLE.write_text(HEAD + "".join(f"{line}\n" for line in sorted({*all_golden} - {*golden} | {*lines})))
    elif lines != golden:
        old, new = golden, lines
        faults += [f"golden: {line}" for line in old if line not in new] + [f"   now: {line}" for line in new if line not in old]
    slowest = [(seconds_alone(nvrtc, what, seconds), what) for seconds, what in slowest]
    slowest.sort(key=lambda timed: timed[0], reverse=True)
    faults += [f"{kernel or module} for sm_{arch} takes {seconds:.1f} s to compile, and {SECONDS:.0f} s are allowed"
               for seconds, (module, arch, kernel) in slowest if seconds > SECONDS]
    seconds, (module, arch, kernel) = slowest[0]
    print(f"gate: {len(jobs)} compilations, {len(lines)} kernels, {time.time() - began:.0f} s; the slowest took "
          f"{seconds:.1f} s: {kernel or module} for sm_{arch}")
    if faults:
        sys.exit("\n".join(f"gate: {fault}" for fault in faults))


if __name__ == "__main__":
    main()
