//! Primary contexts, and which is current in a thread.

use std::cell::Cell;
use std::collections::BTreeMap;

use crate::codes::{INVALID_CONTEXT, NOT_SUPPORTED, Outcome};
use crate::operations::check;

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

/// The number of times that each device's primary context is retained.
#[derive(Default)]
pub struct Primaries(BTreeMap<usize, u32>);

impl Primaries {
    pub fn retain(&mut self, device: usize) -> usize {
        *self.0.entry(device).or_default() += 1;
        FIRST + device * DISTANCE
    }

    /// Undoes one of several: nothing here destroys a context, as the last would.
    pub fn release(&mut self, device: usize) -> Outcome {
        let retained = self.0.get_mut(&device).ok_or(INVALID_CONTEXT)?;
        check(*retained > 1, NOT_SUPPORTED)?;
        *retained -= 1;
        Ok(())
    }

    pub fn is_active(&self, device: usize) -> bool {
        self.0.contains_key(&device)
    }

    /// The device of a context that can be used.
    pub fn device_of(&self, context: usize) -> Outcome<usize> {
        let offset = context.checked_sub(FIRST).ok_or(INVALID_CONTEXT)?;
        let device = offset / DISTANCE;
        if offset % DISTANCE == 0 && self.is_active(device) { Ok(device) } else { Err(INVALID_CONTEXT) }
    }
}
