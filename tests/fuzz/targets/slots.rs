#![no_main]

kvpool_fuzz::target!();
