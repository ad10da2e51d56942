//! Primary contexts, and which is current in a thread.

use std::cell::Cell;

use crate::codes::{CONTEXT_IS_DESTROYED, INVALID_CONTEXT, Outcome};

/// The handle of the first device's primary context.
const FIRST: usize = 0x4000_0000;
const DISTANCE: usize = 0x100;
/// Contexts that a thread can push.
const DEPTH: usize = 64;

#[derive(Clone, Copy)]
struct Stack {
    contexts: [usize; DEPTH],
    depth: usize,
}

thread_local! {
    /// The contexts of this thread, the current one last. It needs no destructor, so that calls may come from those
    /// of a thread that ends.
    static STACK: Cell<Stack> = const { Cell::new(Stack { contexts: [0; DEPTH], depth: 0 }) };
}

/// The current context, 0 for none.
pub fn current() -> usize {
    let stack = STACK.get();
    stack.depth.checked_sub(1).and_then(|top| stack.contexts.get(top)).copied().unwrap_or(0)
}

pub fn push(context: usize) -> Outcome {
    let mut stack = STACK.get();
    *stack.contexts.get_mut(stack.depth).ok_or(INVALID_CONTEXT)? = context;
    stack.depth += 1;
    STACK.set(stack);
    Ok(())
}

pub fn pop() -> Outcome<usize> {
    let mut stack = STACK.get();
    stack.depth = stack.depth.checked_sub(1).ok_or(INVALID_CONTEXT)?;
    STACK.set(stack);
    stack.contexts.get(stack.depth).copied().ok_or(INVALID_CONTEXT)
}

/// Replaces the current context; 0 for none.
pub fn set(context: usize) -> Outcome {
    if STACK.get().depth > 0 {
        pop()?;
    }
    if context == 0 { Ok(()) } else { push(context) }
}

/// The primary contexts.
#[derive(Default)]
pub struct Primaries {
    /// How often each device's was retained.
    retained: Vec<u32>,
    /// Those that the CUDA runtime retains.
    by_runtime: Vec<usize>,
}

impl Primaries {
    fn slot(&mut self, device: usize) -> &mut u32 {
        if self.retained.len() <= device {
            self.retained.resize(device + 1, 0);
        }
        &mut self.retained[device]
    }

    pub fn retain(&mut self, device: usize) -> usize {
        *self.slot(device) += 1;
        handle(device)
    }

    /// Retains a device's context for the CUDA runtime, once.
    pub fn retain_for_runtime(&mut self, device: usize) -> usize {
        if !self.by_runtime.contains(&device) {
            self.by_runtime.push(device);
            self.retain(device);
        }
        handle(device)
    }

    /// Whether that was the last.
    pub fn release(&mut self, device: usize) -> Outcome<bool> {
        let retained = self.slot(device);
        *retained = retained.checked_sub(1).ok_or(INVALID_CONTEXT)?;
        Ok(*retained == 0)
    }

    pub fn is_active(&self, device: usize) -> bool {
        self.retained.get(device).is_some_and(|retained| *retained > 0)
    }

    /// The device of a context that can be used.
    pub fn device_of(&self, context: usize) -> Outcome<usize> {
        let offset = context.checked_sub(FIRST).ok_or(INVALID_CONTEXT)?;
        let device = offset / DISTANCE;
        if offset % DISTANCE != 0 || device >= self.retained.len() {
            return Err(INVALID_CONTEXT);
        }
        if self.is_active(device) { Ok(device) } else { Err(CONTEXT_IS_DESTROYED) }
    }
}

/// The handle of a device's primary context, in use or not.
pub fn handle(device: usize) -> usize {
    FIRST + device * DISTANCE
}
