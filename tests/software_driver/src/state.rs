//! Everything the driver knows, under one lock.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Condvar, Mutex, MutexGuard, Once, OnceLock, PoisonError};

use crate::arena::fatal;
use crate::codes::{Code, SUCCESS};
use crate::contexts::Primaries;
use crate::events::Events;
use crate::kernels;
use crate::ledger::Ledger;
use crate::memory::Memory;
use crate::modules::Modules;
use crate::streams::{FIRST_HANDLE, Streams};

/// The settings that a test may choose.
pub struct Config {
    pub devices: usize,
    pub version: i32,
    /// The answer of `cuInit`.
    pub init_code: Code,
    /// The number of queries with which an event lets what lies before it run; 0 for never.
    pub patience: u64,
    /// The values of `CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR` and `MINOR`.
    pub capability: (i32, i32),
    /// The value of `CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM`.
    pub uses_host_pointers: bool,
    /// Whether freeing memory waits for everything, as a driver may do.
    pub frees_wait: bool,
    /// The copies, fills and launches that a stream takes before a call waits; `None` for any number.
    pub most_queued: Option<usize>,
    /// Functions are loaded when they are first needed.
    pub is_lazy: bool,
    pub stream_handles: StreamHandles,
}

/// The handles that new streams get.
#[derive(PartialEq, Eq)]
pub enum StreamHandles {
    New,
    /// Handles of destroyed streams are reused first, as may happen on a device, where they are addresses.
    Reused,
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
    /// Devices whose context is broken, with what their calls answer.
    pub broken: BTreeMap<usize, Code>,
    last_handle: usize,
}

impl Config {
    fn new() -> Self {
        Self {
            devices: number("KVPOOL_SOFTWARE_DEVICES").and_then(|count| count.try_into().ok()).unwrap_or(2),
            version: number("KVPOOL_SOFTWARE_VERSION").unwrap_or(13_020),
            init_code: number("KVPOOL_SOFTWARE_INIT_ERROR").unwrap_or(SUCCESS),
            patience: 3,
            capability: (9, 0),
            uses_host_pointers: true,
            frees_wait: number("KVPOOL_SOFTWARE_FREE_WAITS") == Some(1),
            most_queued: None,
            is_lazy: std::env::var("CUDA_MODULE_LOADING").map_or(true, |mode| mode != "EAGER"),
            stream_handles: match std::env::var("KVPOOL_SOFTWARE_STREAMS") {
                Ok(mode) if mode == "reused" => StreamHandles::Reused,
                _ => StreamHandles::New,
            },
        }
    }
}

/// A number of the environment.
fn number(name: &str) -> Option<i32> {
    std::env::var(name).ok()?.parse().ok()
}

/// The seed that decides the order of blocks and threads at first.
fn seed() -> u64 {
    number("KVPOOL_SOFTWARE_SEED").map_or(1, |seed| i64::from(seed).cast_unsigned())
}

impl State {
    pub fn new() -> Self {
        kernels::set_seed(seed());
        DOWN.store(false, Relaxed);
        Self {
            config: Config::new(),
            is_initialized: false,
            primaries: Primaries::default(),
            memory: Memory::default(),
            streams: Streams::default(),
            events: Events::default(),
            modules: Modules::default(),
            ledger: Ledger::default(),
            broken: BTreeMap::new(),
            last_handle: FIRST_HANDLE,
        }
    }

    /// Chooses again what is chosen at first.
    pub fn restore(&mut self) {
        self.config = Config::new();
        self.memory.restore_limits();
        self.broken.clear();
        self.open_gates();
        self.ledger.forget_plans();
        kernels::set_seed(seed());
    }

    /// Opens all gates of streams, for calls that wait for one, too.
    pub fn open_gates(&mut self) {
        self.streams.open_gates();
        OPENED.notify_all();
    }

    /// A handle that no other object has or had, but for those of streams that are used again.
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

/// Signalled when gates of streams open.
static OPENED: Condvar = Condvar::new();

/// Waits until gates open. Ends the process if the thread has the lock of Python's interpreter: what a gate stands for
/// may need it.
pub fn wait_for_gates(state: MutexGuard<'static, State>) -> MutexGuard<'static, State> {
    if holds_interpreter() {
        fatal("a call waits for work of the host, and has the interpreter's lock, which that work may need");
    }
    OPENED.wait(state).unwrap_or_else(PoisonError::into_inner)
}

/// Whether this thread holds the lock of Python's interpreter, if there is one in the process.
fn holds_interpreter() -> bool {
    // SAFETY: the name ends with a zero.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"PyGILState_Check".as_ptr()) };
    // SAFETY: the function of this name takes nothing and returns a C int.
    let check = unsafe { std::mem::transmute::<*mut c_void, Option<extern "C" fn() -> c_int>>(found) };
    check.is_some_and(|check| check() == 1)
}

/// Whether the driver goes down, as it does at the end of a process.
static DOWN: AtomicBool = AtomicBool::new(false);

pub fn is_down() -> bool {
    DOWN.load(Relaxed)
}

/// Lets the driver go down, or come back for the next test.
pub fn set_down(is_down: bool) {
    DOWN.store(is_down, Relaxed);
}

/// Lets the driver go down when the process ends, if the environment asks for it.
pub fn go_down_at_exit() {
    extern "C" fn at_exit() {
        set_down(true);
    }
    static ASKED: Once = Once::new();
    ASKED.call_once(|| {
        if number("KVPOOL_SOFTWARE_EXIT") == Some(1) {
            // SAFETY: the handler only stores to an atomic.
            unsafe { libc::atexit(at_exit) };
        }
    });
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
