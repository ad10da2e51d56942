//! Everything the driver knows, under one lock.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, Once, OnceLock, PoisonError};

use crate::codes::{Code, SUCCESS};
use crate::contexts::Primaries;
use crate::events::Events;
use crate::ledger::Ledger;
use crate::memory::Memory;
use crate::modules::Modules;
use crate::streams::{FIRST_HANDLE, Streams};

/// What a test may choose.
pub struct Config {
    pub devices: usize,
    pub version: i32,
    /// What `cuInit` answers.
    pub init_code: Code,
    /// With so many queries an event lets what lies before it run; 0 for never.
    pub patience: u64,
}

pub struct State {
    pub config: Config,
    pub is_initialized: bool,
    pub primaries: Primaries,
    pub memory: Memory,
    pub streams: Streams,
    pub events: Events,
    pub modules: Modules,
    pub ledger: Ledger,
    last_handle: usize,
}

impl Config {
    fn new() -> Self {
        Self {
            devices: number("KVPOOL_SOFTWARE_DEVICES").and_then(|count| count.try_into().ok()).unwrap_or(2),
            version: number("KVPOOL_SOFTWARE_VERSION").unwrap_or(13_020),
            init_code: number("KVPOOL_SOFTWARE_INIT_ERROR").unwrap_or(SUCCESS),
            patience: 3,
        }
    }
}

/// A number of the environment.
fn number(name: &str) -> Option<i32> {
    std::env::var(name).ok()?.parse().ok()
}

impl State {
    pub fn new() -> Self {
        Self {
            config: Config::new(),
            is_initialized: false,
            primaries: Primaries::default(),
            memory: Memory::default(),
            streams: Streams::default(),
            events: Events::default(),
            modules: Modules::default(),
            ledger: Ledger::default(),
            last_handle: FIRST_HANDLE,
        }
    }

    /// A handle that no other object has or had.
    pub fn handle(&mut self) -> usize {
        self.last_handle += 0x10;
        self.last_handle
    }
}

/// The state, which exists from the first call on.
pub fn state() -> MutexGuard<'static, State> {
    static STATE: OnceLock<Mutex<State>> = OnceLock::new();
    STATE.get_or_init(|| Mutex::new(State::new())).lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether this process is the child of one that initialised the driver.
static FORKED: AtomicBool = AtomicBool::new(false);

pub fn is_forked() -> bool {
    FORKED.load(Relaxed)
}

/// Notes forks from now on: the child cannot use the driver.
pub fn watch_for_forks() {
    extern "C" fn in_child() {
        FORKED.store(true, Relaxed);
    }
    static WATCH: Once = Once::new();
    WATCH.call_once(|| {
        // SAFETY: the handler only stores to an atomic, which is allowed in the child of a fork.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
}
