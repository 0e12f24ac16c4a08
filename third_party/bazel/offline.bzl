"""Makes Debian's bazel-bootstrap (4.2.3) work without a network.

Its built-in WORKSPACE suffix downloads rules_cc, rules_java and
remote_coverage_tools as soon as a cc_* target is analysed. Each is declared
with maybe() or can be overridden, so defining the names first wins.
"""

_DEFS = "{r} = native.{r}\n"

def _defs(rules):
    return "".join([_DEFS.format(r = r) for r in rules])

_STUBS = {
    "rules_cc": {
        "cc/BUILD": "",
        "cc/defs.bzl": _defs([
            "cc_binary",
            "cc_import",
            "cc_library",
            "cc_proto_library",
            "cc_test",
            "cc_toolchain",
            "cc_toolchain_suite",
            "objc_library",
        ]),
    },
    "rules_java": {
        "java/BUILD": "",
        "java/defs.bzl": _defs([
            "java_binary",
            "java_import",
            "java_library",
            "java_proto_library",
            "java_runtime",
            "java_test",
            "java_toolchain",
        ]),
    },
    "remote_coverage_tools": {
        "unused.sh": "#!/bin/sh\necho 'coverage reports are not set up' >&2\nexit 1\n",
        "BUILD": """
package(default_visibility = ["//visibility:public"])
[sh_binary(
    name = n,
    srcs = ["unused.sh"],
) for n in ("lcov_merger", "coverage_report_generator")]
""",
    },
}

def _stub_impl(ctx):
    ctx.file("WORKSPACE", "workspace(name = \"%s\")\n" % ctx.name)
    ctx.file("BUILD", "")
    for path, content in ctx.attr.files.items():
        ctx.file(path, content)

_stub_repository = repository_rule(
    implementation = _stub_impl,
    attrs = {
        "files": attr.string_dict(),
    },
    local = True,
)

def offline_bootstrap():
    """Defines the stubs on Debian's bazel; does nothing on newer releases."""

    # Debian's build reports "" (no version); a released Bazel reports "6.5.0".
    if native.bazel_version and not native.bazel_version.startswith("4."):
        return
    for name, files in _STUBS.items():
        _stub_repository(name = name, files = files)
