//! The histories of `tests/rust/histories` for libFuzzer: `KVPOOL_HISTORY` names the one to run.

#![no_main]

#[path = "../../rust/histories/mod.rs"]
mod histories;

use std::sync::LazyLock;

static NAME: LazyLock<String> =
    LazyLock::new(|| std::env::var("KVPOOL_HISTORY").expect("KVPOOL_HISTORY names a history"));

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    histories::run(&NAME, bytes);
});
