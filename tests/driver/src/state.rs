//! Everything the driver knows, under one lock.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use crate::memory::Memory;
use crate::stream::Streams;

/// `CUresult`, and with the same numbers `cudaError_t`.
pub type Code = i32;

pub const SUCCESS: Code = 0;
pub const INVALID_VALUE: Code = 1;
pub const OUT_OF_MEMORY: Code = 2;
pub const NOT_INITIALIZED: Code = 3;
pub const INVALID_DEVICE: Code = 101;
pub const INVALID_IMAGE: Code = 200;
pub const INVALID_CONTEXT: Code = 201;
pub const INVALID_HANDLE: Code = 400;
pub const NOT_FOUND: Code = 500;
pub const NOT_READY: Code = 600;
pub const NOT_SUPPORTED: Code = 801;
pub const CAPTURE_UNSUPPORTED: Code = 900;

/// What PyTorch calls when it slices a tensor, and kvpool never.
const PYTORCH_ONLY: [&str; 1] = ["cuDevicePrimaryCtxGetState"];

/// What gives memory back. A failure there would leak, and nobody could be told.
const GIVES_BACK: [&str; 2] = ["cuMemFreeHost", "cuMemFree_v2"];

/// Whether a failure that names no function passes over a call.
fn is_spared(name: &str) -> bool {
    PYTORCH_ONLY.contains(&name) || GIVES_BACK.contains(&name)
}

/// A call that will fail.
struct Plan {
    /// Of which function; of any, if none is named.
    name: Option<String>,
    /// Calls that succeed before.
    left: u64,
    code: Code,
}

pub struct State {
    pub devices: i32,
    pub version: i32,
    pub init_code: Code,
    pub is_initialized: bool,
    pub memory: Memory,
    pub streams: Streams,
    /// Names of the kernels of each module, as its PTX has them.
    pub modules: HashMap<usize, Vec<String>>,
    pub functions: HashMap<usize, usize>,
    calls: HashMap<String, u64>,
    plans: Vec<Plan>,
    next_handle: usize,
}

impl State {
    fn new() -> Self {
        let number = |name: &str, default: i32| {
            std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
        };
        Self {
            devices: number("KVPOOL_SOFTWARE_DEVICES", 2),
            version: number("KVPOOL_SOFTWARE_VERSION", 12_080),
            init_code: number("KVPOOL_SOFTWARE_INIT_ERROR", SUCCESS),
            is_initialized: false,
            memory: Memory::default(),
            streams: Streams::default(),
            modules: HashMap::new(),
            functions: HashMap::new(),
            calls: HashMap::new(),
            plans: Vec::new(),
            next_handle: 0x5000_0000,
        }
    }

    /// A handle that no other object has.
    pub fn handle(&mut self) -> usize {
        self.next_handle += 16;
        self.next_handle
    }

    pub fn count(&mut self, name: &str) {
        if let Some(count) = self.calls.get_mut(name) {
            *count += 1;
        } else {
            self.calls.insert(name.to_owned(), 1);
        }
    }

    /// Calls of a function since the last reset; of all functions, if none is named.
    pub fn calls(&self, name: Option<&str>) -> u64 {
        match name {
            Some(name) => self.calls.get(name).copied().unwrap_or(0),
            None => {
                let ours = |name: &str| name.starts_with("cu") && !PYTORCH_ONLY.contains(&name);
                self.calls.iter().filter(|(name, _)| ours(name)).map(|(_, count)| count).sum()
            }
        }
    }

    pub fn reset_calls(&mut self) {
        self.calls.clear();
    }

    pub fn plan(&mut self, name: Option<String>, left: u64, code: Code) {
        self.plans.push(Plan { name, left, code });
    }

    pub fn planned(&self) -> usize {
        self.plans.len()
    }

    pub fn forget_plans(&mut self) {
        self.plans.clear();
    }

    /// Counts a call, and says whether it was planned to fail.
    pub fn call(&mut self, name: &str) -> Option<Code> {
        self.count(name);
        let mut failing = None;
        for (at, plan) in self.plans.iter_mut().enumerate() {
            let is_meant = plan.name.as_deref().map_or(!is_spared(name), |planned| planned == name);
            if is_meant {
                if plan.left == 0 && failing.is_none() {
                    failing = Some(at);
                }
                plan.left = plan.left.saturating_sub(1);
            }
        }
        failing.map(|at| self.plans.remove(at).code)
    }
}

/// The state, which exists from the first call on.
pub fn state() -> MutexGuard<'static, State> {
    static STATE: OnceLock<Mutex<State>> = OnceLock::new();
    STATE.get_or_init(|| Mutex::new(State::new())).lock().unwrap_or_else(PoisonError::into_inner)
}
