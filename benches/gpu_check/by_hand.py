"""The second way in: the bundle's cubins by Python's cuda-bindings, where the programs do not start.

    python3 by_hand.py CUBINS [--times] [--small]

Kernels are launched as the launcher of kernels/src/cuda does, with what .ci/gate.txt says of shared memory. The wrappers
of PTX must give the emulator's golden values (kernels/tests/emulated/intrinsics.jsonl): bit for bit, powers within the
manual's ulps. Sums, norms and products of whole numbers are compared with plain Python. --times prints JSON lines with the
cases of kernels/examples/gpu_times; --small is for a device that is not there. Exit 0 where all is right.
"""
import argparse
import array
import json
import pathlib
import random
import statistics
import struct
import sys

from cuda.bindings import driver

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
GOLDEN = ROOT / "kernels" / "tests" / "emulated" / "intrinsics.jsonl"
GATE = ROOT / ".ci" / "gate.txt"
MAX_DYNAMIC_SHARED = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
# Rows, columns and threads of a product's tiles (kernels/src/gpu/gemm.rs).
TILES = [(128, 256, 256), (128, 128, 256), (64, 64, 128)]


class Refused(Exception):
    """A call of the driver that did not do its work."""


def call(function, *args):
    """A call's result, or results; Refused where its code is not 0."""
    code, *results = function(*args)
    if int(code):
        raise Refused(f"{function.__name__}: {code.name}")
    return results[0] if len(results) == 1 else results


def pointer(of):
    return of.buffer_info()[0]


class Device:
    """The first device, its memory and the kernels of a folder."""

    def __init__(self, cubins):
        call(driver.cuInit, 0)
        self.handle = call(driver.cuDeviceGet, 0)
        call(driver.cuCtxSetCurrent, call(driver.cuDevicePrimaryCtxRetain, self.handle))
        attribute = driver.CUdevice_attribute
        major, minor, self.multiprocessors = (
            call(driver.cuDeviceGetAttribute, which, self.handle)
            for which in [attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                          attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
                          attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT])
        self.arch, self.cubins, self.functions = 10 * major + minor, cubins, {}
        lines = [line.split() for line in GATE.read_text().splitlines() if not line.startswith("#")]
        self.dynamic = {words[1]: int(words[3]) for words in lines}

    def has(self, name):
        return bool(list(self.cubins.glob(f"{name}-sm_*.cubin")))

    def function(self, name):
        if name not in self.functions:
            found = sorted(self.cubins.glob(f"{name}-sm_*.cubin"))
            if not found:
                raise Refused(f"no cubin of {name} in {self.cubins}")
            # A line about the cubin goes before it.
            image = found[0].read_bytes().split(b"\n", 1)[1]
            module = call(driver.cuModuleLoadData, image)
            function = call(driver.cuModuleGetFunction, module, name.encode())
            if self.dynamic.get(name, 0) > 48 << 10:
                call(driver.cuFuncSetAttribute, function, MAX_DYNAMIC_SHARED, self.dynamic[name])
            self.functions[name] = (function, module)
        return self.functions[name][0]

    def alloc(self, nbytes):
        return call(driver.cuMemAlloc, nbytes)

    def up(self, raw):
        ptr, host = self.alloc(max(len(raw), 1)), array.array("B", raw)
        call(driver.cuMemcpyHtoDAsync, ptr, pointer(host), len(raw), 0)
        call(driver.cuStreamSynchronize, 0)
        return ptr

    def down(self, ptr, nbytes):
        host = array.array("B", bytes(nbytes))
        call(driver.cuMemcpyDtoHAsync, pointer(host), ptr, nbytes, 0)
        call(driver.cuStreamSynchronize, 0)
        return host.tobytes()

    def free(self, *ptrs):
        for ptr in ptrs:
            call(driver.cuMemFree, ptr)

    def launch(self, name, blocks, threads, types, values, shared=None):
        """types: a letter an argument, of struct: P pointer, q i64, i i32, f f32."""
        held = [array.array("B", struct.pack("<" + kind.replace("P", "Q"), value if kind == "f" else int(value)))
                for kind, value in zip(types, values, strict=True)]
        params = array.array("Q", [pointer(h) for h in held])
        shared = self.dynamic.get(name, 0) if shared is None else shared
        call(driver.cuLaunchKernel, self.function(name), blocks, 1, 1, threads, 1, 1, shared, 0, pointer(params), 0)

    def time(self, body, rounds):
        """The median of some launches, in milliseconds by the device's clock."""
        times, events = [], [call(driver.cuEventCreate, 0) for _ in range(2)]
        for turn in range(rounds + min(rounds, 5)):
            call(driver.cuEventRecord, events[0], 0)
            body()
            call(driver.cuEventRecord, events[1], 0)
            call(driver.cuStreamSynchronize, 0)
            if turn >= min(rounds, 5):
                times.append(call(driver.cuEventElapsedTime, *events))
        return statistics.median(times)


def bf16(values):
    """Rounds what a bf16 holds exactly; more is not asked of it."""
    return b"".join(struct.pack("<f", v)[2:] for v in values)


def widened(raw):
    return [struct.unpack("<f", b"\0\0" + raw[i : i + 2])[0] for i in range(0, len(raw), 2)]


def floats(raw):
    return list(struct.unpack(f"<{len(raw) // 4}f", raw))


def ulps_apart(x, y):
    """Between two floats of one sign, as their bits count."""
    at = lambda v: struct.unpack("<i", struct.pack("<f", v))[0]
    return abs(at(x) - at(y))


def intrinsics(device):
    """Each golden line whose kernel is there; stmatrix is not before sm_90."""
    ran = 0
    for line in GOLDEN.read_text().splitlines():
        case = json.loads(line)
        name, want = case["kernel"], bytes.fromhex(case["out"])
        if not device.has(name):
            if name.startswith("move_") and device.arch < 90:
                continue
            raise Refused(f"no cubin of {name}")
        arrays = [device.up(bytes.fromhex(raw)) for raw in case["in"]]
        out = device.up(bytes(len(want)))
        types = "P" * (len(arrays) + 1) + "i" * len(case["numbers"])
        device.launch(name, 1, case["threads"], types, [*arrays, out, *case["numbers"]], case["shared"])
        got = device.down(out, len(want))
        if case["ulps"]:
            far = max(ulps_apart(x, y) for x, y in zip(floats(got), floats(want)))
            if far > case["ulps"]:
                raise Refused(f"{name}: {far} ulps off where {case['ulps']} are allowed")
        elif got != want:
            first = next(i for i in range(len(want)) if got[i] != want[i]) // 4 * 4
            here, there = got[first : first + 4].hex(), want[first : first + 4].hex()
            raise Refused(f"{name}: {here} from byte {first} on where the emulator gives {there}")
        device.free(*arrays, out)
        ran += 1
    return ran


def sums(device):
    n = 1000
    x, y = [float(i) for i in range(n)], [float(3 * i) for i in range(n)]
    a, b = (device.up(struct.pack(f"<{n}f", *v)) for v in [x, y])
    device.launch("add_f32", (n + 255) // 256, 256, "PPq", [a, b, n])
    if floats(device.down(a, 4 * n)) != [u + v for u, v in zip(x, y)]:
        raise Refused("add_f32: wrong sums")
    device.free(a, b)


def norms(device):
    rows, dim = 3, 64
    draw = random.Random(1)
    x, w = ([draw.randint(-8, 8) / 8 for _ in range(n)] for n in [rows * dim, dim])
    ptrs = [device.up(bf16(v)) for v in [x, w]]
    y, rstd = device.alloc(2 * rows * dim), device.alloc(4 * rows)
    norm(device, rows, dim, ptrs[0], ptrs[1], y, rstd)
    got = widened(device.down(y, 2 * rows * dim))
    for row in range(rows):
        of = x[row * dim : (row + 1) * dim]
        scale = (sum(v * v for v in of) / dim + 1e-5) ** -0.5
        for i in range(dim):
            want = w[i] * of[i] * scale
            if abs(got[row * dim + i] - want) > 2**-8 * abs(want):
                raise Refused(f"rms_norm_bf16_wide: {got[row * dim + i]} where {want} is right")
    device.free(*ptrs, y, rstd)


def norm(device, rows, dim, x, w, y, rstd):
    device.launch("rms_norm_bf16_wide", rows, 256, "PPPPPPqf", [x, 0, 0, w, y, rstd, dim, 1e-5])


def product(device, a, b, c, n, out="bf16"):
    """c = a b of n x n, by the tile that the launcher takes."""
    def blocks(tile):
        return -(-n // tile[0]) * -(-n // tile[1])

    rows, columns, threads = next((t for t in TILES if blocks(t) >= device.multiprocessors), TILES[-1])
    name = f"gemm_nn_bf16_{out}_{rows}x{columns}"
    device.launch(name, blocks((rows, columns)), threads, "PPPPPqqqiii", [a, b, 0, 0, c, n, n, n, 0, 0, 1])


def products(device):
    n, draw = 64, random.Random(2)
    x, y = ([float(draw.randint(-8, 8)) for _ in range(n * n)] for _ in range(2))
    a, b, c = device.up(bf16(x)), device.up(bf16(y)), device.alloc(4 * n * n)
    product(device, a, b, c, n, "f32")
    want = [sum(x[i * n + k] * y[k * n + j] for k in range(n)) for i in range(n) for j in range(n)]
    if floats(device.down(c, 4 * n * n)) != want:
        raise Refused("gemm_nn_bf16_f32: not the product of whole numbers")
    device.free(a, b, c)


def times(device, small):
    rounds = 1 if small else 20

    def uniform(n):
        # In [-1, 1), a million of them over and over.
        draw = random.Random(3)
        some = bf16([draw.randint(-128, 127) / 128 for _ in range(min(n, 1 << 20))])
        return device.up((some * -(-n * 2 // len(some)))[: 2 * n])

    def say(case, work, unit, body):
        ms = device.time(body, rounds)
        print(json.dumps({"case": case, "ms": round(ms, 5), unit: round(work / ms * 1e-9, 3)}), flush=True)

    for named in [1024, 4096, 8192]:
        n = min(named, 64) if small else named
        a, b, c = uniform(n * n), uniform(n * n), device.alloc(2 * n * n)
        say(f"gemm_nn {named}", 2 * n**3, "tflops", lambda: product(device, a, b, c, n))
        device.free(a, b, c)
    rows, dim = (16, 64) if small else (16384, 4096)
    x, w, y, rstd = uniform(rows * dim), uniform(dim), device.alloc(2 * rows * dim), device.alloc(4 * rows)
    nbytes = 2 * rows * dim
    copy = lambda: call(driver.cuMemcpyDtoDAsync, y, x, nbytes, 0)
    say("copy 16384x4096", 2 * nbytes, "tbps", copy)
    say("rms_norm 16384x4096", 2 * nbytes, "tbps", lambda: norm(device, rows, dim, x, w, y, rstd))
    device.free(x, w, y, rstd)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cubins", type=pathlib.Path)
    parser.add_argument("--times", action="store_true")
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    try:
        device = Device(args.cubins)
        if args.times:
            return times(device, args.small)
        ran = intrinsics(device)
        for check in [sums, norms, products]:
            check(device)
    except (Refused, OSError) as error:
        sys.exit(f"by hand: {error}")
    print(f"by hand: sm_{device.arch}, {ran} golden lines and 3 kernels are right")


main()
