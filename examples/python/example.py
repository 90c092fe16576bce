#!/usr/bin/env python3
"""Deploys an image some times, shows how it goes, and takes everything away again.

    example.py [--host HOST] [--ca F] [--token F | --cert F --key F] [--count N] [--follow] IMAGE [CMD...]
"""

import argparse
import concurrent.futures
import sys
import uuid

import dewpoint

RUN = uuid.uuid4()  # asked for twice in this run it is the same deployment, in the next one another


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--host", default=dewpoint.DEFAULT_HOST)
    for f in ("--ca", "--token", "--cert", "--key"):
        p.add_argument(f)
    p.add_argument("--name", default="example")
    p.add_argument("--count", type=int, default=2)
    p.add_argument("--follow", action="store_true", help="show their output until they have ended")
    p.add_argument("image")
    p.add_argument("cmd", nargs=argparse.REMAINDER)
    a = p.parse_args()
    node = dewpoint.Node(a.host, ca=a.ca, token=a.token, cert=a.cert, key=a.key)

    names = [f"{a.name}-{i + 1}" for i in range(a.count)]
    try:
        with concurrent.futures.ThreadPoolExecutor(a.count) as pool:
            for f in [pool.submit(deploy, node, a, n) for n in names]:
                f.result()
        for c in node.list(all=True):
            if c["name"] in names:
                print(c["name"], c["status"])
                for stream, data in node.logs(c["name"], follow=a.follow):
                    print(f"{c['name']} {stream}: {data.decode(errors='replace')}", end="")
    finally:
        for n in names:
            try:
                node.remove(n, force=True)
            except dewpoint.Error as e:
                if e.code != "not_found":
                    raise


def deploy(node, a, name):
    spec = {"image": a.image, "name": name, "cmd": a.cmd, "net": "none"}
    for step in node.deploy(spec, key=f"{RUN}/{name}", deadline=600):
        if "stage" in step:
            print(f"{name}: {step['stage']['stage']} after {step['stage'].get('at', 0):.2f} s")
        if "record" in step:
            print(f"{name}: {step['record']['bytes'].get('registry', 0)} bytes from the registry")


if __name__ == "__main__":
    try:
        main()
    except dewpoint.Error as e:
        sys.exit(f"example.py: {e}")
