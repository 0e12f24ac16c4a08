"""@local_cuda: the host's CUDA toolkit, or an empty stand-in when there is none."""

_BUILD = """
package(default_visibility = ["//visibility:public"])

# True when a toolkit was found and --//third_party/bazel:cuda was not switched off.
config_setting(
    name = "enabled",
    {condition}
)

exports_files(glob(["nvcc.sh"]))

# cuda_runtime_api.h & co for host code (not cub/thrust: .cu files get them from nvcc).
cc_library(
    name = "headers",
    hdrs = glob(["include/*.h", "include/*.hpp", "include/crt/**"]),
    includes = ["include"],
)

# The runtime API, static: it dlopens libcuda.so.1, so the binary starts without a GPU.
cc_library(
    name = "cudart",
    linkopts = {linkopts},
    deps = [":headers"],
)
"""

def _find(ctx):
    home = ctx.os.environ.get("CUDA_HOME", "")
    if home == "none":
        return None
    candidates = [home] if home else ["/usr/local/cuda", "/usr/lib/nvidia-cuda-toolkit", "/opt/cuda"]
    for c in candidates:
        if ctx.path(c + "/bin/nvcc").exists:
            return c
    if home:
        fail("CUDA_HOME=%s has no bin/nvcc (CUDA_HOME=none builds CPU-only)" % home)
    nvcc = ctx.which("nvcc")
    return str(nvcc.realpath.dirname.dirname) if nvcc else None

def _impl(ctx):
    home = _find(ctx)
    if home:
        lib = home + "/lib64"
        ctx.file("nvcc.sh", "#!/bin/sh\nexec %s/bin/nvcc \"$@\"\n" % home, executable = True)
        ctx.symlink(home + "/include", "include")
        condition = "flag_values = {\"@summaryd//third_party/bazel:cuda\": \"True\"},"
        linkopts = ["-L" + lib, "-l:libcudart_static.a", "-ldl", "-lrt", "-pthread"]
    else:
        # Never true.
        condition = "values = {\"define\": \"local_cuda=never\"},"
        linkopts = []
    ctx.file("BUILD", _BUILD.format(condition = condition, linkopts = repr(linkopts)))
    ctx.file("defs.bzl", "CUDA_HOME = %s\n" % repr(home or ""))

cuda_configure = repository_rule(
    implementation = _impl,
    environ = ["CUDA_HOME", "PATH"],
    local = True,
)
