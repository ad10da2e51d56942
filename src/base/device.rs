//! Devices, named as PyTorch names them.

use std::fmt;

use super::{Error, Result};

/// A device that holds tensors.
///
/// ```
/// use kvpool::base::Device;
/// assert_eq!(Device::parse("cuda").unwrap(), Device::Cuda(0));
/// assert_eq!(Device::Cuda(1).to_string(), "cuda:1");
/// assert!(Device::parse("mps").is_err());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Device {
    /// Host memory.
    Cpu,
    /// An NVIDIA device, by its ordinal.
    Cuda(u32),
}

impl Device {
    /// Reads `cpu`, `cpu:0`, `cuda` or `cuda:N`.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](super::ErrorKind::Config) for anything else.
    pub fn parse(text: &str) -> Result<Self> {
        match text.split_once(':') {
            None if text == "cpu" => Some(Self::Cpu),
            None if text == "cuda" => Some(Self::Cuda(0)),
            Some(("cpu", "0")) => Some(Self::Cpu),
            Some(("cuda", ordinal)) if ordinal.bytes().all(|byte| byte.is_ascii_digit()) => {
                ordinal.parse().ok().map(Self::Cuda)
            }
            _ => None,
        }
        .ok_or_else(|| Error::config(format!("unknown device '{text}'; use 'cpu', 'cuda' or 'cuda:N'")))
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}
