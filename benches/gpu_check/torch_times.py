"""torch's times of the cases of kernels/examples/gpu_times: random data, CUDA events, medians; one JSON line a case and way."""
import json
import statistics
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

ROUNDS = 20


def time(case, way, work, unit, body):
    try:
        for _ in range(5):
            body()
        times = []
        for _ in range(ROUNDS):
            before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            before.record()
            body()
            after.record()
            torch.cuda.synchronize()
            times.append(before.elapsed_time(after))
    except (RuntimeError, AttributeError) as error:
        print(json.dumps({"case": case, "way": way, "refused": str(error).splitlines()[0]}), flush=True)
        return
    ms = statistics.median(times)
    print(json.dumps({"case": case, "way": way, "ms": round(ms, 5), unit: round(work / ms * 1e-9, 3)}), flush=True)


def uniform(*shape, dtype=torch.bfloat16):
    return torch.rand(*shape, device="cuda", dtype=torch.float32).mul_(2).sub_(1).to(dtype)


def gemm(n):
    a, b = uniform(n, n), uniform(n, n)
    out = torch.empty(n, n, device="cuda", dtype=torch.bfloat16)
    for form, x, y in [("nn", a, b), ("nt", a, b.t()), ("tn", a.t(), b)]:
        time(f"gemm_{form} {n}", "cublas", 2 * n**3, "tflops", lambda: torch.matmul(x, y, out=out))


def attention(b, s, h, d):
    q, k, v = (uniform(b, h, s, d).requires_grad_() for _ in range(3))
    dout, work, name = uniform(b, h, s, d), 2 * b * h * s * s * d, f"b{b} s{s} h{h} d{d}"
    ways = [("flash", SDPBackend.FLASH_ATTENTION, False), ("cudnn", SDPBackend.CUDNN_ATTENTION, False),
            ("flash deterministic", SDPBackend.FLASH_ATTENTION, True)]
    for way, backend, deterministic in ways:
        torch.use_deterministic_algorithms(deterministic, warn_only=True)
        with sdpa_kernel(backend):
            forward = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)
            time(f"attention {name}", way, work, "tflops", forward)
            try:
                o = forward()
            except RuntimeError:
                continue
            backward = lambda: torch.autograd.grad(o, (q, k, v), dout, retain_graph=True)
            time(f"attention_backward {name}", way, 2.5 * work, "tflops", backward)
    torch.use_deterministic_algorithms(False)


def memory_bound():
    rows, dim = 16384, 4096
    x, y, w, out = uniform(rows, dim), uniform(rows, dim), uniform(dim), uniform(rows, dim)
    n = rows * dim
    time("copy 16384x4096", "torch", 4 * n, "tbps", lambda: out.copy_(x))
    time("rms_norm 16384x4096", "torch", 4 * n, "tbps", lambda: F.rms_norm(x, (dim,), w, 1e-5))
    time("swiglu 16384x4096", "torch", 6 * n, "tbps", lambda: F.silu(x) * y)
    p = uniform(n, dtype=torch.float32).requires_grad_()
    p.grad = uniform(n, dtype=torch.float32)
    optimizer = torch.optim.AdamW([p], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    time("adamw 67108864", "torch", 28 * n, "tbps", optimizer.step)


if not torch.cuda.is_available():
    sys.exit("torch sees no CUDA device")
torch.manual_seed(1)
print(json.dumps({"torch": torch.__version__, "device": torch.cuda.get_device_name(), "cuda": torch.version.cuda}), flush=True)
for n in [1024, 4096, 8192]:
    gemm(n)
for shape in [(2, 8192, 16, 128), (4, 4096, 16, 64), (2, 4096, 8, 256)]:
    attention(*shape)
memory_bound()
