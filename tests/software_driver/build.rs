//! Compiles the kernels for the host, and gives the library the name under which programs look for a driver.

/// The folder with the sources of the kernels.
const KERNELS: &str = "../../src/kernels";

fn main() {
    for source in [
        "params.cuh",
        "convert.cuh",
        "plan.cuh",
        "unit_plan.cuh",
        "plan.cu",
        "plan_long.cu",
        "rows.cu",
        "table.cu",
    ] {
        println!("cargo:rerun-if-changed={KERNELS}/{source}");
    }
    println!("cargo:rerun-if-changed=host.cpp");
    println!("cargo:rerun-if-changed=build.rs");
    cc::Build::new()
        .cpp(true)
        // The kernels need nothing of the library.
        .cpp_link_stdlib(None)
        // Some compilers do not know the names that Rust has for targets.
        .no_default_flags(true)
        .flags(["-std=c++14", "-O2", "-g", "-fPIC", "-Wall", "-Wextra", "-Wno-unknown-pragmas"])
        .flags(["-fno-exceptions", "-fno-rtti"])
        .include(KERNELS)
        // A device may read memory as any type; a host compiler would use that it must not.
        .flag("-fno-strict-aliasing")
        // This compiles as the kernels are compiled for devices: no fused multiply-add that the source does not ask
        // for.
        .flag("-ffp-contract=off")
        // A device stops at a misaligned address, so the host does it too, with SIGILL.
        .flags(["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"])
        .file("host.cpp")
        .compile("kernels");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
}
