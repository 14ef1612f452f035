#!/usr/bin/env python3
"""Opens pages of quintet in headless Chromium, drives them by keyboard, takes pictures of them in light and
dark, narrow and wide, and fails on anything that a page says on its console or asks of a network.

    .ci/look_at_report.py --make target/debug/quintet              runs 16 ranks on five axes, plans a large model, and looks
    .ci/look_at_report.py runs/0001/report.html [more.html]        looks at these
    ... --out DIR                                                  keeps the pictures (default: a temporary folder)

Needs Chromium (`apt-get install chromium`, or CHROMIUM=/path) and Python's own library: the browser is driven
over its pipe (--remote-debugging-pipe), so nothing listens on a port.
"""
import argparse
import base64
import json
import os
import pathlib
import select
import shutil
import subprocess
import sys
import tempfile
import time

SIZES = {"wide": (1280, 900), "narrow": (390, 844)}
MOST_BYTES = 2_000_000
LIMIT_S = 60
MAKE = "train --model tiny-moe --dp 2 --tp 2 --pp 2 --cp 2 --ep 4 --steps {steps} --eval-interval 5 --prove --quiet"

PLAN = "plan --model llama3-405b --gpus 16384 --preset h100"


class Browser:
    """Chromium, spoken to by DevTools messages: JSON, each ended by a NUL, in on 3 and out on 4."""

    def __init__(self, program, profile):
        to_browser, self.write_end = os.pipe()
        self.read_end, from_browser = os.pipe()
        flags = [
            "--headless=new", "--remote-debugging-pipe", f"--user-data-dir={profile}", "--no-first-run",
            "--no-default-browser-check", "--disable-extensions", "--disable-background-networking", "--disable-sync",
            "--disable-component-update", "--hide-scrollbars", "--disable-dev-shm-usage",
            # Whatever asks for a host fails at once, and so is seen below.
            "--host-resolver-rules=MAP * ~NOTFOUND",
        ]
        if os.geteuid() == 0:
            flags.append("--no-sandbox")

        def ends():
            # Moved out of the way first, for one of them may be 3 or 4 itself.
            far = os.dup(to_browser), os.dup(from_browser)
            os.dup2(far[0], 3)
            os.dup2(far[1], 4)

        self.process = subprocess.Popen(
            [program, *flags, "about:blank"], preexec_fn=ends, close_fds=False,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_browser)
        os.close(from_browser)
        self.number, self.rest, self.events = 0, b"", []

    def receive(self, timeout):
        """The next message, or none within the time."""
        while b"\0" not in self.rest:
            if not select.select([self.read_end], [], [], timeout)[0]:
                return None
            data = os.read(self.read_end, 1 << 20)
            if not data:
                raise SystemExit("the browser went away")
            self.rest += data
        message, self.rest = self.rest.split(b"\0", 1)
        return json.loads(message)

    def call(self, method, session=None, **params):
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self.write_end, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + LIMIT_S
        while time.monotonic() < until:
            answer = self.receive(1)
            if answer is None:
                continue
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise SystemExit(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self.events.append(answer)
        raise SystemExit(f"{method}: no answer in {LIMIT_S} s")

    def settle(self, seconds):
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if (event := self.receive(left)) is not None:
                self.events.append(event)

    def close(self):
        try:
            self.call("Browser.close")
        except (SystemExit, OSError):
            self.process.kill()
        self.process.wait(timeout=20)


def complaints(events, page):
    """What a page said or asked for that it should not have."""
    for event in events:
        method, params = event.get("method", ""), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            yield "exception: " + details.get("exception", {}).get("description", details["text"])
        elif method == "Runtime.consoleAPICalled":
            said = " ".join(str(a.get("value", a.get("description", ""))) for a in params["args"])
            yield f"console.{params['type']}: {said}"
        elif method == "Log.entryAdded":
            yield f"{params['entry']['level']}: {params['entry']['text']}"
        elif method == "Network.requestWillBeSent":
            url = params["request"]["url"]
            if url != page and not url.startswith("data:"):
                yield f"asked for {url}"


def keys(browser, session, *names):
    codes = {"ArrowRight": 39, "ArrowLeft": 37, "ArrowUp": 38, "ArrowDown": 40, "Tab": 9}
    for name in names:
        text = name if len(name) == 1 else ""
        for kind in ("keyDown", "keyUp"):
            extra = {"text": text} if text and kind == "keyDown" else {}
            browser.call("Input.dispatchKeyEvent", session, type=kind, key=name,
                         windowsVirtualKeyCode=codes.get(name, 0), **extra)


def evaluate(browser, session, expression):
    answer = browser.call("Runtime.evaluate", session, expression=expression, returnByValue=True)
    if "exceptionDetails" in answer:
        raise SystemExit(f"{expression}: {answer['exceptionDetails']['text']}")
    return answer["result"].get("value")


def walk(browser, session):
    """Uses a page without a pointer: everything that takes the focus shows it, charts answer to keys."""
    wrong = []
    reached = set()
    for _ in range(80):
        keys(browser, session, "Tab")
        what = evaluate(browser, session, """(() => { const e = document.activeElement; if (!e || e === document.body) return null;
            const s = getComputedStyle(e); return [e.tagName.toLowerCase(), e.getAttribute('aria-label') || e.textContent.slice(0, 40),
            s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) > 0]; })()""")
        if what is None:
            continue
        if not what[2]:
            wrong.append(f"the focus does not show on {what[0]} “{what[1]}”")
        reached.add(what[0])
        if what[0] in ("svg", "canvas"):
            after = "document.activeElement.closest('.plot').parentElement.querySelector('.readout')?.textContent || ''"
            walks = (".", ".", "ArrowDown") if what[0] == "canvas" else ("ArrowRight", "ArrowRight")
            keys(browser, session, *walks)
            if not evaluate(browser, session, after):
                wrong.append(f"{what[0]} “{what[1]}” does not answer to its keys")
            if what[0] == "canvas":
                keys(browser, session, "+", "+", "ArrowRight", "-", "0")
    if evaluate(browser, session, "document.querySelectorAll('svg[tabindex], canvas[tabindex]').length"):
        for name in ("svg", "canvas"):
            there = evaluate(browser, session, f"document.querySelectorAll('{name}[tabindex]').length")
            if there and name not in reached:
                wrong.append(f"no {name} is reached by Tab")
    names = evaluate(browser, session, """[...document.querySelectorAll('button, select, svg[role=img], canvas[role=img], a[href], summary')]
        .filter((e) => !(e.getAttribute('aria-label') || e.textContent.trim() || (e.id && document.querySelector(`label[for=${e.id}]`)))).length""")
    if names:
        wrong.append(f"{names} controls or pictures have no name")
    return wrong


def sections(browser, session, width, stem):
    """A picture of each section, one by one."""
    boxes = evaluate(browser, session, """[...document.querySelectorAll('header.top, section')].map((e) =>
        { const b = e.getBoundingClientRect(); return [e.id || 'head', b.top + scrollY, b.height]; })""")
    for name, top, height in boxes:
        shot = browser.call("Page.captureScreenshot", session, captureBeyondViewport=True,
                            clip={"x": 0, "y": top, "width": width, "height": height, "scale": 1})
        stem.with_name(f"{stem.name}-{name}.png").write_bytes(base64.b64decode(shot["data"]))


def look(browser, path, out, parts):
    """Pictures of a page, and what is wrong with it."""
    url = path.resolve().as_uri()
    wrong = []
    if path.stat().st_size > MOST_BYTES:
        wrong.append(f"{path.stat().st_size} bytes, more than {MOST_BYTES}")
    for scheme in ("light", "dark"):
        for size, (width, height) in SIZES.items():
            target = browser.call("Target.createTarget", url="about:blank")["targetId"]
            session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                browser.call(f"{domain}.enable", session)
            browser.call("Emulation.setEmulatedMedia", session, features=[{"name": "prefers-color-scheme", "value": scheme}])
            browser.call("Emulation.setDeviceMetricsOverride", session, width=width, height=height, deviceScaleFactor=1, mobile=size == "narrow")
            browser.events.clear()
            browser.call("Page.navigate", session, url=url)
            until = time.monotonic() + LIMIT_S
            while evaluate(browser, session, "document.readyState") != "complete":
                if time.monotonic() > until:
                    raise SystemExit(f"{path}: not loaded in {LIMIT_S} s")
                browser.settle(0.05)
            browser.settle(0.5)
            full = evaluate(browser, session, "[document.documentElement.scrollWidth, document.documentElement.scrollHeight]")
            if full[0] > width:
                wrong.append(f"{scheme} {size}: {full[0]} pixels wide in a window of {width}")
            if size == "wide" and scheme == "light":
                wrong += walk(browser, session)
                evaluate(browser, session, "document.activeElement.blur(), window.scrollTo(0, 0)")
                browser.settle(0.6)
            shot = browser.call("Page.captureScreenshot", session, captureBeyondViewport=True,
                                clip={"x": 0, "y": 0, "width": width, "height": min(full[1], 16000), "scale": 1})
            picture = out / f"{path.stem}-{scheme}-{size}.png"
            picture.write_bytes(base64.b64decode(shot["data"]))
            print(f"{picture}: {width} x {full[1]}")
            if parts:
                sections(browser, session, width, out / f"{path.stem}-{scheme}-{size}")
            wrong += [f"{scheme} {size}: {said}" for said in complaints(browser.events, url)]
            browser.call("Target.closeTarget", targetId=target)
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=pathlib.Path)
    parser.add_argument("--make", metavar="QUINTET", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--parts", action="store_true", help="a picture of each section too")
    args = parser.parse_args()
    names = [os.environ.get("CHROMIUM"), "chromium", "chromium-browser", "google-chrome"]
    program = next((found for name in names if name and (found := shutil.which(name))), None)
    if program is None:
        raise SystemExit("no Chromium: apt-get install chromium, or set CHROMIUM")
    folder = pathlib.Path(tempfile.mkdtemp(prefix="quintet-look-"))
    out = args.out or folder
    out.mkdir(parents=True, exist_ok=True)
    pages = args.pages
    if args.make:
        subprocess.run([args.make.resolve(), *MAKE.format(steps=args.steps).split(), "--run-dir", folder / "run"], check=True, cwd=folder)
        plan = folder / "plan.html"
        subprocess.run([args.make.resolve(), *PLAN.split(), "--html", plan], check=True, cwd=folder, stdout=subprocess.DEVNULL)
        pages = [*pages, folder / "run/report.html", plan]
    if not pages:
        parser.error("name a page, or give --make")
    browser = Browser(program, folder / "profile")
    wrong = []
    try:
        for page in pages:
            wrong += [f"{page}: {what}" for what in look(browser, page, out, args.parts)]
    finally:
        browser.close()
        shutil.rmtree(folder / "profile", ignore_errors=True)
    for what in wrong:
        print(what, file=sys.stderr)
    sys.exit(1 if wrong else 0)


main()
