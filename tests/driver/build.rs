//! Compiles the kernels for the host, and gives the library the name under which programs look for a driver.

fn main() {
    let sources = ["params.cuh", "convert.cuh", "rows.cu", "table.cu"];
    for source in sources {
        println!("cargo:rerun-if-changed=../../src/kernels/{source}");
    }
    println!("cargo:rerun-if-changed=host.cpp");
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .opt_level(2)
        // The kernels need nothing of the library, which then need not be there.
        .cpp_link_stdlib(None)
        .flag("-fno-exceptions")
        .flag("-fno-rtti")
        .include("../../src/kernels")
        .flag("-fno-strict-aliasing")
        .flag("-Wno-unknown-pragmas")
        .file("host.cpp")
        .compile("kernels");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
}
