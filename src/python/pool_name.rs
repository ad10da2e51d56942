//! Names of pools.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex};

use super::lock;

/// The name of a pool, shared by those who report about it: it can be changed at any time.
#[derive(Clone, Debug)]
pub(super) struct PoolName(Arc<Mutex<String>>);

impl PoolName {
    /// Names the next object of a class: `class` and a number.
    pub(super) fn next(class: &'static str) -> Self {
        static MADE: Mutex<Option<HashMap<&'static str, usize>>> = Mutex::new(None);
        let mut made = lock(&MADE);
        let number = made.get_or_insert_default().entry(class).or_default();
        let name = format!("{class}-{number}");
        *number += 1;
        Self::from(name)
    }

    /// Changes the name.
    pub(super) fn set(&self, name: String) {
        *lock(&self.0) = name;
    }
}

impl From<String> for PoolName {
    fn from(name: String) -> Self {
        Self(Arc::new(Mutex::new(name)))
    }
}

impl fmt::Display for PoolName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&lock(&self.0))
    }
}
