"""cuda_library: .cu files compiled by nvcc, usable as a cc_library dependency."""

load("@local_cuda//:defs.bzl", "CUDA_HOME")
load("@rules_cc//cc:defs.bzl", "cc_library")

# Machine code for each architecture that we name, and PTX of the newest for those to come.
DEFAULT_GENCODE = [
    "arch=compute_%s,code=sm_%s" % (a, a)
    for a in ["80", "86", "89", "90", "100", "120"]
] + ["arch=compute_120,code=compute_120"]

def _nvcc_objects_impl(ctx):
    contexts = [d[CcInfo].compilation_context for d in ctx.attr.deps]
    headers = depset(ctx.files.hdrs, transitive = [c.headers for c in contexts])
    flags = ctx.actions.args()
    flags.add_all(["-std=c++20", "-c", "-Xcompiler", "-fPIC,-Wall,-Wextra", "-lineinfo", "-Werror", "all-warnings", "-fmad=false", "--threads", "2"])
    flags.add_all(ctx.attr.gencode, before_each = "-gencode")
    if ctx.var["COMPILATION_MODE"] == "dbg":
        flags.add_all(["-g", "-O0"])
    else:
        flags.add_all(["-O3", "-DNDEBUG"])
    flags.add("-I.")
    flags.add("-I" + ctx.bin_dir.path)
    for c in contexts:
        flags.add_all(c.includes, before_each = "-I")
        flags.add_all(c.quote_includes, before_each = "-I")
        flags.add_all(c.system_includes, before_each = "-isystem")
        flags.add_all(c.defines, format_each = "-D%s")
    flags.add_all(ctx.attr.copts)
    objects = []
    for src in ctx.files.srcs:
        obj = ctx.actions.declare_file("_nvcc/%s/%s.o" % (ctx.label.name, src.basename[:-len(".cu")]))
        ctx.actions.run(
            executable = ctx.file._nvcc,
            arguments = [flags, src.path, "-o", obj.path],
            inputs = depset([src], transitive = [headers]),
            outputs = [obj],
            mnemonic = "NvccCompile",
            progress_message = "Compiling CUDA %s" % src.short_path,
            use_default_shell_env = True,  # nvcc needs PATH to find the host compiler
        )
        objects.append(obj)
    return [DefaultInfo(files = depset(objects))]

_nvcc_objects = rule(
    implementation = _nvcc_objects_impl,
    attrs = {
        "srcs": attr.label_list(allow_files = [".cu"]),
        "hdrs": attr.label_list(allow_files = True),
        "deps": attr.label_list(providers = [CcInfo]),
        "copts": attr.string_list(),
        "gencode": attr.string_list(mandatory = True),
        "_nvcc": attr.label(default = "@local_cuda//:nvcc.sh", allow_single_file = True),
    },
)

def cuda_library(name, srcs, hdrs = [], deps = [], copts = [], gencode = DEFAULT_GENCODE, fallback_srcs = [], **kwargs):
    """Compiles srcs with nvcc; without CUDA, compiles fallback_srcs with the C++ compiler.

    Args:
      name: a cc_library of this name.
      srcs: .cu files.
      hdrs: headers; they must not need CUDA when fallback_srcs is used.
      deps: cc_library dependencies of the .cu files and of the fallback.
      copts: extra nvcc options.
      gencode: values for nvcc -gencode.
      fallback_srcs: C++ sources with the same symbols for the CPU-only build.
      **kwargs: to cc_library.
    """
    if not CUDA_HOME:
        cc_library(name = name, srcs = fallback_srcs, hdrs = hdrs, deps = deps, **kwargs)
        return
    _nvcc_objects(
        name = name + "_objs",
        srcs = srcs,
        hdrs = hdrs,
        deps = deps + ["@local_cuda//:headers"],
        copts = copts,
        gencode = gencode,
        tags = ["manual"],
    )
    cc_library(
        name = name,
        srcs = select({
            "@local_cuda//:enabled": [name + "_objs"],
            "//conditions:default": fallback_srcs,
        }),
        hdrs = hdrs,
        deps = deps + select({
            "@local_cuda//:enabled": ["@local_cuda//:cudart"],
            "//conditions:default": [],
        }),
        **kwargs
    )
