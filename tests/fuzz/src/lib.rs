//! The histories of `tests/rust/histories` as fuzz targets, one a file in `targets`.

#[path = "../../rust/histories/mod.rs"]
mod histories;

#[doc(hidden)]
pub use libfuzzer_sys;

/// Runs the history of that name with choices from `bytes`.
///
/// # Panics
/// When a pool does not do what its model does.
pub fn run(name: &str, bytes: &[u8]) {
    histories::run(name, bytes);
}

/// The fuzz target that has the name of its binary.
#[macro_export]
macro_rules! target {
    () => {
        $crate::libfuzzer_sys::fuzz_target!(|bytes: &[u8]| $crate::run(env!("CARGO_BIN_NAME"), bytes));
    };
}
