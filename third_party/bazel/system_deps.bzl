"""@sys: C++ libraries and tools that Debian packages installed on the host.

Headers are found in /usr/include (a built-in include directory of the compiler),
so each library is only a set of link options, in two flavours:
  default                      -lfoo            (shared)
  --//third_party/bazel:static_deps=true   -l:libfoo.a ...  (static, for portable binaries)
"""

# name -> (Debian package, header that must exist, pkg-config modules, extra -l, deps)
_LIBS = {
    "absl": ("libabsl-dev", "absl/base/config.h", [
        "absl_any_invocable",
        "absl_failure_signal_handler",
        "absl_flags_parse",
        "absl_flat_hash_map",
        "absl_random_random",
        "absl_statusor",
        "absl_str_format",
        "absl_synchronization",
    ], [], []),
    "protobuf": ("libprotobuf-dev", "google/protobuf/message.h", ["protobuf"], [], []),
    "grpcpp": ("libgrpc++-dev", "grpcpp/grpcpp.h", ["grpc++"], [], [":protobuf"]),
    "grpcpp_reflection": (
        "libgrpc++-dev",
        "grpcpp/ext/proto_server_reflection_plugin.h",
        [],
        ["grpc++_reflection"],
        [":grpcpp"],
    ),
    "grpcpp_channelz": (
        "libgrpc++-dev",
        "grpcpp/ext/channelz_service_plugin.h",
        [],
        ["grpcpp_channelz"],
        [":grpcpp"],
    ),
    "openssl": ("libssl-dev", "openssl/ssl.h", ["openssl"], [], []),
    "json": ("nlohmann-json3-dev", "nlohmann/json.hpp", [], [], []),
    "xxhash": ("libxxhash-dev", "xxhash.h", [], [], []),  # used as headers only
    "zlib": ("zlib1g-dev", "zlib.h", ["zlib"], [], []),
    "gtest": ("libgtest-dev", "gtest/gtest.h", ["gtest"], [], []),
    "gtest_main": ("libgtest-dev", "gtest/gtest.h", [], ["gtest_main"], [":gtest"]),
    "gmock": ("libgmock-dev", "gmock/gmock.h", [], ["gmock"], [":gtest"]),
}

# Always the shared glibc, also in the static flavour.
_SYSTEM = ["-ldl", "-lrt", "-lpthread", "-lm", "-latomic"]

_TOOLS = {
    "protoc": "protobuf-compiler",
    "grpc_cpp_plugin": "protobuf-compiler-grpc",
}

def _pkg_config(ctx, modules):
    if not modules:
        return []
    res = ctx.execute(["pkg-config", "--libs", "--static"] + modules)
    if res.return_code:
        fail("pkg-config --libs %s: %s" % (" ".join(modules), res.stderr))
    libs = []
    for word in reversed(res.stdout.replace("\n", " ").split(" ")):
        if word.startswith("-l") and word not in _SYSTEM and word[2:] not in libs:
            libs.insert(0, word[2:])  # the last occurrence of each -lfoo: link order
    return libs

def _one(ctx, name, spec):
    package, header, modules, extra, deps = spec
    if not ctx.path("/usr/include/" + header).exists:
        fail("missing /usr/include/%s: apt-get install %s" % (header, package))
    libs = extra + _pkg_config(ctx, modules)
    shared = (["-Wl,--push-state,--as-needed"] + ["-l" + lib for lib in libs] +
              ["-Wl,--pop-state", "-pthread"])
    static = (["-Wl,--start-group"] + ["-l:lib%s.a" % lib for lib in libs] +
              ["-Wl,--end-group", "-ldl", "-lrt", "-pthread"])
    return """cc_library(
    name = "{name}",
    linkopts = select({{
        "@summaryd//third_party/bazel:use_static_deps": {static},
        "//conditions:default": {shared},
    }}),
    deps = {deps},
)
""".format(
        name = name,
        static = repr(static),
        shared = repr(shared),
        deps = repr(deps),
    )

def _impl(ctx):
    out = ["package(default_visibility = [\"//visibility:public\"])\n"]
    for name, spec in _LIBS.items():
        out.append(_one(ctx, name, spec))
    for tool, package in _TOOLS.items():
        path = ctx.path("/usr/bin/" + tool)
        if not path.exists:
            fail("missing /usr/bin/%s: apt-get install %s" % (tool, package))
        ctx.symlink(path, "bin/" + tool)
        out.append("filegroup(\n    name = \"%s\",\n    srcs = [\"bin/%s\"],\n)\n" % (tool, tool))
    ctx.file("BUILD", "\n".join(out))

system_deps = repository_rule(
    implementation = _impl,
    environ = ["PKG_CONFIG_PATH"],
    local = True,  # re-evaluated at each server start: sees apt upgrades
)
