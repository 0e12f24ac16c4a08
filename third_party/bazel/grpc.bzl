"""Code generation with the system protoc."""

load("@rules_cc//cc:defs.bzl", "cc_library")

ProtoSourcesInfo = provider(
    doc = "The .proto files of a target and of its dependencies.",
    fields = {"transitive": "depset of files"},
)

def _protoc_impl(ctx):
    transitive = depset(
        ctx.files.srcs,
        transitive = [d[ProtoSourcesInfo].transitive for d in ctx.attr.deps],
    )
    out = {"cc": [], "h": []}
    root = ctx.label.package  # imports are relative to the package of the rule
    for src in ctx.files.srcs:
        stem = src.short_path[len(root) + 1:-len(".proto")]
        for kind in ["pb"] + (["grpc.pb"] if ctx.attr.grpc else []):
            out["cc"].append(ctx.actions.declare_file("%s.%s.cc" % (stem, kind)))
            out["h"].append(ctx.actions.declare_file("%s.%s.h" % (stem, kind)))
    gen = ctx.bin_dir.path + "/" + root
    args = ctx.actions.args()
    args.add("-I" + root)
    for d in ctx.attr.deps:
        args.add("-I" + d.label.package)
    args.add("--cpp_out=" + gen)
    tools = [ctx.file._protoc]
    if ctx.attr.grpc:
        args.add("--plugin=protoc-gen-grpc=" + ctx.file._cpp.path)
        args.add("--grpc_out=" + gen)
        tools.append(ctx.file._cpp)
    args.add_all(ctx.files.srcs)
    outputs = out["cc"] + out["h"]
    ctx.actions.run(
        executable = ctx.file._protoc,
        arguments = [args],
        inputs = transitive,
        tools = tools,
        outputs = outputs,
        mnemonic = "Protoc",
        progress_message = "Generating code from %s" % ", ".join([f.short_path for f in ctx.files.srcs]),
    )
    return [
        DefaultInfo(files = depset(outputs)),
        OutputGroupInfo(cc = depset(out["cc"]), h = depset(out["h"])),
        ProtoSourcesInfo(transitive = transitive),
    ]

_protoc = rule(
    implementation = _protoc_impl,
    attrs = {
        "srcs": attr.label_list(allow_files = [".proto"]),
        "deps": attr.label_list(providers = [ProtoSourcesInfo]),
        "grpc": attr.bool(default = True),
        "_protoc": attr.label(default = "@sys//:protoc", allow_single_file = True),
        "_cpp": attr.label(default = "@sys//:grpc_cpp_plugin", allow_single_file = True),
    },
)

def grpc_library(name, srcs, deps = [], grpc = True, **kwargs):
    """Messages and services of .proto files, for C++.

    Args:
      name: a cc_library of this name.
      srcs: .proto files; imports are relative to the package of the rule.
      deps: other grpc_library targets, for imports.
      grpc: also generate service stubs.
      **kwargs: to cc_library.
    """
    _protoc(
        name = name + "_gen",
        srcs = srcs,
        deps = [d + "_gen" for d in deps],
        grpc = grpc,
    )
    for group in ("cc", "h"):
        native.filegroup(
            name = "%s_gen_%s" % (name, group),
            srcs = [name + "_gen"],
            output_group = group,
        )
    cc_library(
        name = name,
        srcs = [name + "_gen_cc"],
        hdrs = [name + "_gen_h"],
        copts = ["-w"],
        includes = ["."],
        deps = deps + (["@sys//:grpcpp"] if grpc else ["@sys//:protobuf"]),
        **kwargs
    )
