//! Element types of tensors.

use std::fmt;

use super::{Error, Result};

/// The element type of a tensor.
///
/// ```
/// use kvpool::base::DType;
/// assert_eq!(DType::parse("bfloat16").unwrap().size(), 2);
/// assert_eq!(DType::F8E4M3.name(), "float8_e4m3fn");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE 754 binary64. Read by conversions, never stored.
    F64,
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// The upper half of a binary32.
    BF16,
    /// OCP 8-bit float, 4 exponent and 3 mantissa bits, no infinities.
    F8E4M3,
    /// OCP 8-bit float, 5 exponent and 2 mantissa bits.
    F8E5M2,
    /// 8-bit signed integer.
    I8,
    /// 8-bit unsigned integer.
    U8,
    /// 32-bit signed integer: the dtype of index tensors, unless a pool is asked for 64 bits.
    I32,
    /// 64-bit signed integer: accepted in every index tensor.
    I64,
    /// Boolean, one byte per element. Never stored.
    Bool,
    /// 16-bit signed integer. Read as indices, never stored or handed out.
    I16,
    /// 16-bit unsigned integer. Like [`DType::I16`].
    U16,
    /// 32-bit unsigned integer. Like [`DType::I16`].
    U32,
    /// 64-bit unsigned integer. Like [`DType::I16`].
    U64,
}

impl DType {
    /// The dtypes of KV buffers and convolution states.
    pub const STORAGE: [Self; 7] =
        [Self::F32, Self::F16, Self::BF16, Self::F8E4M3, Self::F8E5M2, Self::I8, Self::U8];

    /// Every dtype that a tensor of kvpool can have.
    pub const ALL: [Self; 11] = [
        Self::F64,
        Self::F32,
        Self::F16,
        Self::BF16,
        Self::F8E4M3,
        Self::F8E5M2,
        Self::I8,
        Self::U8,
        Self::I32,
        Self::I64,
        Self::Bool,
    ];

    /// Returns the size of one element in bytes.
    #[must_use]
    pub const fn size(self) -> usize {
        match self {
            Self::F64 | Self::I64 | Self::U64 => 8,
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::F16 | Self::BF16 | Self::I16 | Self::U16 => 2,
            Self::F8E4M3 | Self::F8E5M2 | Self::I8 | Self::U8 | Self::Bool => 1,
        }
    }

    /// Returns the name of this dtype in PyTorch and NumPy (with `ml_dtypes`).
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F64 => "float64",
            Self::F32 => "float32",
            Self::F16 => "float16",
            Self::BF16 => "bfloat16",
            Self::F8E4M3 => "float8_e4m3fn",
            Self::F8E5M2 => "float8_e5m2",
            Self::I8 => "int8",
            Self::U8 => "uint8",
            Self::I32 => "int32",
            Self::I64 => "int64",
            Self::Bool => "bool",
            Self::I16 => "int16",
            Self::U16 => "uint16",
            Self::U32 => "uint32",
            Self::U64 => "uint64",
        }
    }

    /// Returns whether this is an 8-bit float.
    #[must_use]
    pub const fn is_fp8(self) -> bool {
        matches!(self, Self::F8E4M3 | Self::F8E5M2)
    }

    /// Returns whether elements are integers or booleans.
    #[must_use]
    pub const fn is_integer(self) -> bool {
        !matches!(self, Self::F64 | Self::F32 | Self::F16 | Self::BF16 | Self::F8E4M3 | Self::F8E5M2)
    }

    /// Parses the name of a storage dtype, with or without the prefix `torch.`.
    ///
    /// # Errors
    /// [`ErrorKind::Type`](super::ErrorKind::Type) for a name that is not in [`DType::STORAGE`].
    pub fn parse(name: &str) -> Result<Self> {
        Self::parse_one_of(&Self::STORAGE, name)
    }

    /// Parses the name of any dtype, for memory without a fixed use.
    ///
    /// # Errors
    /// [`ErrorKind::Type`](super::ErrorKind::Type) for a name that is not in [`DType::ALL`].
    pub fn parse_any(name: &str) -> Result<Self> {
        Self::parse_one_of(&Self::ALL, name)
    }

    fn parse_one_of(known: &[Self], name: &str) -> Result<Self> {
        let bare = name.strip_prefix("torch.").unwrap_or(name);
        known.iter().copied().find(|dtype| dtype.name() == bare).ok_or_else(|| {
            let known = known.iter().map(|dtype| dtype.name()).collect::<Vec<_>>().join(", ");
            Error::wrong_type(format!("dtype {name} cannot be stored; use one of {known}"))
        })
    }
}

/// The dtype of the index tensors that a pool hands out.
///
/// ```
/// use kvpool::base::{DType, IndexDType};
/// assert_eq!(IndexDType::parse("torch.int64").unwrap(), IndexDType::I64);
/// assert_eq!(IndexDType::default().dtype(), DType::I32);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IndexDType {
    /// int32.
    #[default]
    I32,
    /// int64, for engines whose kernels read no other.
    I64,
}

impl IndexDType {
    /// Parses the name of a dtype, with or without the prefix `torch.`.
    ///
    /// # Errors
    /// [`ErrorKind::Type`](super::ErrorKind::Type) for any name but int32 and int64.
    pub fn parse(name: &str) -> Result<Self> {
        match name.strip_prefix("torch.").unwrap_or(name) {
            "int32" => Ok(Self::I32),
            "int64" => Ok(Self::I64),
            other => Err(Error::wrong_type(format!("index_dtype must be int32 or int64, not {other}"))),
        }
    }

    /// Returns the dtype of the tensors.
    #[must_use]
    pub const fn dtype(self) -> DType {
        match self {
            Self::I32 => DType::I32,
            Self::I64 => DType::I64,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
