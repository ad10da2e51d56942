//! Modules: kernels that were loaded, as PTX or as cubins, and what a driver needs to know of PTX to find them in it.

use std::collections::HashMap;

use crate::arena::fatal;
use crate::codes::{INVALID_HANDLE, INVALID_PTX, NO_BINARY_FOR_GPU, NOT_FOUND, Outcome, UNSUPPORTED_PTX};
use crate::cubin::Cubin;
use crate::kernels::{self, Kernel};

/// The most bytes of a kernel's parameters: of old drivers and old PTX, and from these versions on.
const SHORT_PARAMS: usize = 4096;
const LONG_PARAMS: usize = 32_764;
const LONG_SINCE_DRIVER: i32 = 12_010;
const LONG_SINCE_PTX: (i32, i32) = (8, 1);

struct Module {
    device: usize,
    /// Names and bytes of parameters.
    entries: HashMap<String, usize>,
}

/// A kernel of a module.
#[derive(Clone, Copy)]
pub struct Function {
    pub kernel: &'static Kernel,
    pub device: usize,
    /// Whether it is in the memory of the device, where only what is loaded can be launched.
    pub is_loaded: bool,
    module: usize,
}

#[derive(Default)]
pub struct Modules {
    modules: HashMap<usize, Module>,
    functions: HashMap<usize, Function>,
}

impl Modules {
    /// Loads PTX for a device of a capability, under a handle.
    pub fn load(
        &mut self,
        handle: usize,
        device: usize,
        text: &str,
        driver_version: i32,
        capability: (i32, i32),
    ) -> Outcome {
        let entries = read(text, driver_version, capability)?;
        self.modules.insert(handle, Module { device, entries });
        Ok(())
    }

    /// Loads a cubin for a device of a capability, under a handle.
    pub fn load_cubin(
        &mut self,
        handle: usize,
        device: usize,
        image: &[u8],
        (major, minor): (i32, i32),
    ) -> Outcome {
        let Cubin { architecture, entries } = Cubin::read(image)?;
        // It runs on devices of its own generation that are not older.
        if architecture / 10 != major || architecture % 10 > minor {
            return Err(NO_BINARY_FOR_GPU);
        }
        self.modules.insert(handle, Module { device, entries });
        Ok(())
    }

    pub fn unload(&mut self, handle: usize) -> Outcome {
        self.modules.remove(&handle).ok_or(INVALID_HANDLE)?;
        self.functions.retain(|_, function| function.module != handle);
        Ok(())
    }

    /// A kernel that the PTX has and that was compiled for the host, under a handle, or the handle it has already.
    ///
    /// Ends the process if the two differ in their parameters: the PTX was not made of the source that is here.
    pub fn function(&mut self, handle: usize, module: usize, name: &str, is_loaded: bool) -> Outcome<usize> {
        let loaded = self.modules.get(&module).ok_or(INVALID_HANDLE)?;
        let bytes = *loaded.entries.get(name).ok_or(NOT_FOUND)?;
        let kernel = kernels::find(name).ok_or(NOT_FOUND)?;
        if kernel.params_bytes() != bytes {
            let compiled = kernel.params_bytes();
            fatal(&format!(
                "{name} takes {bytes} bytes in the PTX, {compiled} in the source: generate it again"
            ));
        }
        let is_same = |function: &Function| function.module == module && function.kernel.name() == name;
        if let Some((&found, _)) = self.functions.iter().find(|(_, function)| is_same(function)) {
            return Ok(found);
        }
        self.functions.insert(handle, Function { kernel, device: loaded.device, is_loaded, module });
        Ok(handle)
    }

    pub fn set_loaded(&mut self, function: usize) {
        if let Some(function) = self.functions.get_mut(&function) {
            function.is_loaded = true;
        }
    }

    pub fn get(&self, function: usize) -> Outcome<Function> {
        self.functions.get(&function).copied().ok_or(INVALID_HANDLE)
    }
}

/// The entries of PTX, with the bytes of their parameters.
fn read(text: &str, driver_version: i32, capability: (i32, i32)) -> Outcome<HashMap<String, usize>> {
    let version = directive(text, ".version").ok_or(INVALID_PTX)?;
    let (major, minor) = version.split_once('.').ok_or(INVALID_PTX)?;
    let version = (number(major)?, number(minor)?);
    let target =
        directive(text, ".target").and_then(|target| target.strip_prefix("sm_")).ok_or(INVALID_PTX)?;
    if number(target.trim_end_matches([',', 'a', 'f']))? > capability.0 * 10 + capability.1 {
        return Err(INVALID_PTX);
    }
    if directive(text, ".address_size") != Some("64") {
        return Err(INVALID_PTX);
    }
    if version > newest_ptx(driver_version) {
        return Err(UNSUPPORTED_PTX);
    }
    let entries: HashMap<_, _> = text.split(".entry ").skip(1).map(entry).collect::<Outcome<_>>()?;
    let most = if version < LONG_SINCE_PTX { SHORT_PARAMS } else { LONG_PARAMS };
    if entries.values().any(|bytes| *bytes > most) {
        return Err(INVALID_PTX);
    }
    Ok(entries)
}

/// The name of an entry and the bytes of its only parameter, of the text behind `.entry`.
fn entry(text: &str) -> Outcome<(String, usize)> {
    let (name, rest) = text.split_once('(').ok_or(INVALID_PTX)?;
    let (params, _) = rest.split_once(')').ok_or(INVALID_PTX)?;
    // Written as `.param .align 8 .b8 NAME[BYTES]`.
    let bytes = params.split_once('[').and_then(|(_, rest)| rest.split_once(']')).ok_or(INVALID_PTX)?.0;
    let bytes = bytes.trim().parse().map_err(|_| INVALID_PTX)?;
    Ok((name.trim().to_owned(), bytes))
}

/// The first word behind a directive that stands at the beginning of a line.
fn directive<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let mut rest = text.lines().filter_map(|line| line.trim_start().strip_prefix(name));
    rest.next()?.split_whitespace().next()
}

fn number(text: &str) -> Outcome<i32> {
    text.parse().map_err(|_| INVALID_PTX)
}

/// The most bytes of parameters that a driver of this version passes to a kernel.
pub fn most_params(driver_version: i32) -> usize {
    if driver_version < LONG_SINCE_DRIVER { SHORT_PARAMS } else { LONG_PARAMS }
}

/// The newest PTX that a driver of this version compiles.
fn newest_ptx(driver_version: i32) -> (i32, i32) {
    let (major, minor) = (driver_version / 1000, driver_version % 1000 / 10);
    match (major, minor) {
        (12, 6..) => (8, minor - 1),
        // One number was skipped in 12.6.
        (12, _) => (8, minor),
        (13.., _) => (major - 4, minor),
        _ => (7, minor),
    }
}
