"""winnow grade: the verifiers of a data root as a service, for trainers that ask for rewards.

It grades what `winnow export` wrote: a ground truth has the prompt's id, its verifier and its
answer. It listens on loopback. With --host other machines can reach it, and must send the token
that it prints, as `Authorization: Bearer TOKEN` or `?token=TOKEN`.

    POST /grade      [{"completion": ..., "label": ...}, ...]    a verdict for each
    POST /slime      {"prompt": ..., "response": ..., "label": ...}     the reward (--rm-url)
    POST /openrlhf   {"query": [...], "prompts": [...], "labels": [...]}    (reward.remote_url)

A completion that could not be graded has no reward: null in /grade; elsewhere the call fails."""

import argparse
import secrets

from flows.cli import flags
from flows.pipeline import roots
from flows.serve import server
from tasks.common.processes.ports import LOOPBACK
from tasks.train.external import service


def add_options(parser: argparse.ArgumentParser) -> None:
    flags.add_root(parser)
    parser.add_argument("--port", type=int, default=8008, help="default: %(default)s")
    parser.add_argument(
        "--host",
        default=server.HOST,
        metavar="ADDRESS",
        help="address of this machine for others; default: %(default)s, only this machine",
    )


def run(options: argparse.Namespace) -> int:
    """Serve until interrupted."""
    root = roots.existing(options.data)
    server.check_port("the grader", options.host, options.port, "--port")
    token = None if options.host in LOOPBACK else secrets.token_urlsafe(24)
    with service.opened(root.values, root.layout) as grading:
        print(f"grading {len(grading.prompts)} prompts of {root.folder}", flush=True)
        print(f"WINNOW_GRADER=http://{options.host}:{options.port}", flush=True)
        if token:
            print(f"WINNOW_TOKEN={token}", flush=True)
        service.serve(grading, options.host, options.port, token)
    return 0
