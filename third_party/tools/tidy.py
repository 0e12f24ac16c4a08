#!/usr/bin/python3
"""Runs clang-tidy over what compile_commands.json has of kernels/, server/ and client/, but for tests and what
speaks gRPC.

The files of a folder are looked at together, included by one source: the headers, which take most of the
time, are read once for all. (The analyzer counts a .cc that a source includes as code of that source.) Where
this finds anything, or two files have a name in common, each half is looked at, down to single files: what is
found in one alone counts.
"""
import collections
import concurrent.futures
import json
import os
import subprocess
import sys
import tempfile

FOLDERS = ("kernels", "server", "client")
TOGETHER = 8  # files at most, so that there are groups enough for every core


def tidy(source, arguments):
    """Output of clang-tidy, empty where it finds nothing."""
    run = subprocess.run(["clang-tidy-14", "--quiet", "--warnings-as-errors=*", "--config-file=.clang-tidy",
                          source, "--", *arguments],
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True, check=False)
    return "" if run.returncode == 0 else run.stdout or run.stderr


def split(arguments):
    """Options and include folders of a compiler command."""
    options, includes = [], []
    words = iter(arguments[1:arguments.index("-c")])
    for word in words:
        if word in ("-iquote", "-isystem"):
            includes.append((word, next(words)))
        else:
            options.append(word)
    return tuple(options), includes


def speaks_grpc(name):
    with open(name, encoding="utf-8") as f:
        return "grpc" in f.read()


def groups():
    """(files, arguments) of files of one folder and with the same options; include folders are added up."""
    found = collections.defaultdict(lambda: ([], {}))
    with open("compile_commands.json", encoding="utf-8") as f:
        for command in json.load(f):
            name = os.path.relpath(command["file"])
            if name.split("/")[0] not in FOLDERS or "_test." in name:
                continue
            if speaks_grpc(name):
                continue
            options, includes = split(command["arguments"])
            files, folders = found[os.path.dirname(name), options]
            files.append(name)
            folders.update(dict.fromkeys(includes))
    for (_, options), (files, folders) in found.items():
        arguments = [*options, *(word for folder in folders for word in folder)]
        parts = -(-len(files) // TOGETHER)
        for part in range(parts):
            yield sorted(files)[part::parts], arguments


def check(files, arguments):
    """What clang-tidy finds in these files."""
    if len(files) == 1:
        return tidy(files[0], arguments)
    with tempfile.NamedTemporaryFile("w", suffix=".cc") as together:
        together.writelines('#include "%s"  // NOLINT\n' % os.path.abspath(name) for name in files)
        together.flush()
        if not tidy(together.name, arguments):
            return ""
    half = len(files) // 2
    return check(files[:half], arguments) + check(files[half:], arguments)


def main():
    work = sorted(groups(), key=lambda group: -len(group[0]))
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        findings = "".join(pool.map(lambda group: check(*group), work))
    print("%sclang-tidy: %d files" % (findings, sum(len(files) for files, _ in work)))
    sys.exit(1 if findings else 0)


main()
