"""@local_ucx: Debian's libucx-dev, or an empty stand-in where it is not installed."""

_BUILD = """
package(default_visibility = ["//visibility:public"])

# True when UCX was found and --//third_party/bazel:ucx was not switched off.
config_setting(
    name = "enabled",
    {condition}
)

# Always the shared libraries: the archives work only with their constructors named one by one, and a machine
# may bring a newer UCX than the one that was built with.
cc_library(
    name = "ucx",
    linkopts = ["-Wl,--push-state,--as-needed", "-lucp", "-lucs", "-Wl,--pop-state"],
)
"""

def _impl(ctx):
    if ctx.path("/usr/include/ucp/api/ucp.h").exists:
        condition = "flag_values = {\"@summaryd//third_party/bazel:ucx\": \"True\"},"
    else:
        # Never true.
        condition = "values = {\"define\": \"local_ucx=never\"},"
    ctx.file("BUILD", _BUILD.format(condition = condition))

ucx_configure = repository_rule(
    implementation = _impl,
    local = True,  # re-evaluated at each server start: sees apt upgrades
)
