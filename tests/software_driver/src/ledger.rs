//! The calls that were made, and those that will fail.

use std::collections::HashMap;

use crate::codes::Code;

/// A call that will fail.
struct Plan {
    /// The function that fails; any, if none is named.
    name: Option<String>,
    /// Calls that go well before.
    left: u64,
    code: Code,
}

#[derive(Default)]
pub struct Ledger {
    calls: HashMap<String, u64>,
    plans: Vec<Plan>,
}

/// The text that stands before a kernel's name where its launches are counted.
pub const LAUNCH: &str = "launch:";

/// The text that stands before `ptx` or `cubin` where images that were loaded are counted.
pub const LOAD: &str = "load:";

/// The text that stands before `sleeps` or `spins` where waits for events are counted.
pub const WAIT: &str = "wait:";

/// The beginning of functions of the runtime, which kvpool does not call: those that are counted are counted by their
/// names only.
const RUNTIME: &str = "cuda";

/// PyTorch calls this one at any time, kvpool does not: it is counted by its name, but not among all functions.
const BESIDE: &str = "cuDevicePrimaryCtxGetState";

impl Ledger {
    pub fn count(&mut self, name: &str) {
        if let Some(count) = self.calls.get_mut(name) {
            *count += 1;
        } else {
            self.calls.insert(name.to_owned(), 1);
        }
    }

    /// Calls of a function since the last reset; of all driver functions, if none is named.
    pub fn calls(&self, name: Option<&str>) -> u64 {
        if let Some(name) = name {
            return self.calls.get(name).copied().unwrap_or(0);
        }
        let others = [LAUNCH, LOAD, WAIT, RUNTIME];
        let is_driver = |name: &str| !others.iter().any(|start| name.starts_with(start)) && name != BESIDE;
        let functions = self.calls.iter().filter(|(name, _)| is_driver(name));
        functions.map(|(_, count)| count).sum()
    }

    pub fn reset(&mut self) {
        self.calls.clear();
    }

    /// Lets the `number`-th call from now (1 is the next) fail once.
    pub fn plan(&mut self, name: Option<String>, number: u64, code: Code) {
        self.plans.push(Plan { name, left: number.saturating_sub(1), code });
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
        let mut due = None;
        for (at, plan) in self.plans.iter_mut().enumerate() {
            if plan.name.as_deref().map_or(name != BESIDE, |planned| planned == name) {
                if plan.left == 0 && due.is_none() {
                    due = Some(at);
                }
                plan.left = plan.left.saturating_sub(1);
            }
        }
        due.map(|at| self.plans.remove(at).code)
    }
}
