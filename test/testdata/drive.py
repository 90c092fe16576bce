"""Drives a node by examples/python: what python_test.go wants to see. Each line that it prints
is asserted there; a file that it waits for says that the test has done its part."""

import os
import sys
import threading
import time

import dewpoint


def await_file(path):
    for _ in range(1200):
        if os.path.exists(path):
            return
        time.sleep(0.05)
    sys.exit("not in time: " + path)


def deploy(node, image):
    spec = {"image": image, "name": "py", "net": "none", "cmd": ["cat", "/etc/motd"]}
    stages, first = [], None
    for step in node.deploy(spec, key="once", deadline=120):
        if "stage" in step:
            stages.append(step["stage"]["stage"])
        first = step.get("record", first)
    print("stages", " ".join(s for s in stages if s in ("resolved", "mounted", "created", "started", "ready")))
    again = [s["record"] for s in node.deploy(spec, key="once") if "record" in s][-1]
    print("same", again["id"] == first["id"], len(node.list(all=True)))
    try:
        for _ in node.deploy(dict(spec, cmd=["cat", "/etc/other"]), key="once"):
            pass
    except dewpoint.Error as e:
        print("other", e.code)


def look(node):
    print("list", [c["name"] for c in node.list(all=True)])
    out = [d for s, d in node.logs("py", follow=True) if s == "stdout"]
    print("logs", b"".join(out).decode().strip())
    node.stop("py", timeout=1)
    node.remove("py", force=True)
    try:
        node.remove("py")
    except dewpoint.Error as e:
        print("removed", e.code, e.exit)


def cancel(node, image):
    """A generator that is closed cancels its deployment."""
    steps = node.deploy({"image": image, "name": "gone", "net": "none", "cmd": ["sleep", "1h"], "ready": "cmd:false"})
    for step in steps:
        if step.get("stage", {}).get("stage") == "started":
            break
    steps.close()
    for _ in range(600):
        if not node.list(all=True):
            print("canceled")
            return
        time.sleep(0.05)


def events(node, dir):
    """Events go on when dewd was killed and is there again: the first of the new one's too."""
    seen = []
    ready, done = threading.Event(), threading.Event()

    def follow():
        for e in node.events(after=0):
            seen.append(e)
            ready.set()
            if e.get("kind") == "removed" and e.get("name") == "later":
                done.set()
                return

    threading.Thread(target=follow, daemon=True).start()
    if not ready.wait(60):
        sys.exit("no event came")
    open(os.path.join(dir, "following"), "w").close()
    await_file(os.path.join(dir, "restarted"))
    if not done.wait(60):
        sys.exit(f"events did not go on: {seen}")
    print("resync", [e["kind"] for e in seen].count("resync"), len({e["epoch"] for e in seen}))
    print("events", any(e.get("name") == "py" for e in seen), [e["kind"] for e in seen if e.get("name") == "later" and e["kind"] == "removed"])


def main(host, dir, image, *credentials):
    node = dewpoint.Node(host, **dict(c.split("=", 1) for c in credentials))
    if credentials:
        print("version", node.version()["node"])
        try:
            node.remove("nothing")
        except dewpoint.Error as e:
            print("refused", e.code)
        try:
            list(node.deploy({"image": image}))
        except dewpoint.Error as e:
            print("refused", e.code)
        return
    deploy(node, image)
    look(node)
    cancel(node, image)
    events(node, dir)


main(*sys.argv[1:])
