"""NCCL on the device: a part of benches/gpu-check.

    nccl                   which library, and whether it lets two ranks have one GPU (2.30 and newer)
    nccl alone             a world of one: every operation, type and fold, in place, of nothing; started, split, every drop
                           order, an abort, a deadline, what the device itself finds wrong
    nccl two ranks         the operations again, messages, and a rank that leaves: two ranks on this GPU, where they may
    nccl verify, train     the program over NCCL: one rank, then two that share this GPU, where they may
    nccl two refused       two ranks on one GPU, where nobody has allowed it: one sentence, exit 2
"""
import ctypes
import os
import pathlib
import sys
import tempfile

PROGRAMS = ["nccl", "libquintet_nccl_shim.so"]
SHARED = 23000


def library(bundle, dry):
    """The library that is named, the stand-in, or that of a wheel of this Python."""
    if dry:
        return bundle / "libquintet_nccl_shim.so"
    if os.environ.get("QUINTET_NCCL_LIB"):
        return pathlib.Path(os.environ["QUINTET_NCCL_LIB"])
    wheels = [pathlib.Path(folder) / "nvidia/nccl/lib/libnccl.so.2" for folder in sys.path]
    return next((wheel for wheel in wheels if wheel.exists()), pathlib.Path("libnccl.so.2"))


def version(path):
    """As NCCL numbers it; 0 where the library cannot be loaded or asked."""
    number = ctypes.c_int()
    try:
        failed = ctypes.CDLL(str(path)).ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return 0
    return 0 if failed else number.value


def stages(check, bundle):
    """Runs them; `check` has the environment, and writes down how each ended."""
    path = library(bundle, check.dry)
    found = version(path)
    two = found >= SHARED
    check.note(f"{'nccl':<24} {found} at {path}; two ranks on one GPU: {'yes' if two else 'no, 2.30 does'}")
    if not found:
        check.say("nccl", "no library", 0)
        return
    before = dict(check.environment)
    check.environment["QUINTET_NCCL_LIB"] = str(path)
    if check.dry:
        check.environment["QUINTET_NCCL_SHIM"] = f"driver={bundle / 'libquintet_driver_shim.so'}"
    try:
        with tempfile.TemporaryDirectory() as folder:
            commands(check, bundle, two, folder)
    finally:
        check.environment = before


def commands(check, bundle, two, folder):
    """One rank, then two where they may; runs are kept in `folder`, for none to read."""
    test = [bundle / "nccl", "--nocapture", "--test-threads=1"]
    small = ["--model", "tiny", "--dtype", "f32", "--seq-length", "8", "--micro-batch-size", "1", "--global-batch-size", "2"]
    over = ["--device", "cuda", "--transport", "nccl", "--steps", "2"]
    verify = [bundle / "quintet", "verify", *over, *small, "--optimizer", "sgd", "--json"]
    train = [bundle / "quintet", "train", *over, *small, "--eval-interval", "0", "--quiet", "--run-dir"]
    check.part("nccl", 7 if two else 4)
    check.run("nccl alone", [*test, "alone::"], "nccl.txt")
    check.run("nccl verify", [*verify, "--dp", "1"], "nccl.txt")
    check.run("nccl train", [*train, f"{folder}/one", "--dp", "1"], "nccl.txt")
    # Over the stand-in for the driver, too: it has one device unless told.
    refused = lambda code, text: code == 2 and text.count("\n") == 1 and "ranks 0 and 1 would share GPU" in text
    check.run("nccl two refused", [*verify, "--dp", "2"], "nccl.txt", refused)
    if two:
        # NVIDIA's guide for a GPU that ranks share: few channels, and no NVLS, which wants whole GPUs.
        check.environment |= {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4", "NCCL_NVLS_ENABLE": "0"}
        check.run("nccl two ranks", [*test, "shared::"], "nccl.txt")
        check.run("nccl verify, two ranks", [*verify, "--dp", "2"], "nccl.txt")
        check.run("nccl train, two ranks", [*train, f"{folder}/two", "--tp", "2"], "nccl.txt")
