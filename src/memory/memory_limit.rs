//! The host memory that this process may use.

use std::fs::read_to_string;
use std::path::{Path, PathBuf};

/// A bound of the host memory that this process may use.
///
/// ```
/// use kvpool::memory::MemoryLimit;
/// match MemoryLimit::now() {
///     Some(limit @ (MemoryLimit::Container(_) | MemoryLimit::Machine(_))) => assert!(limit.bytes() > 0),
///     None => (), // the system does not tell
/// }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryLimit {
    /// The smallest limit of the control groups of this process, in bytes.
    Container(u64),
    /// The bytes of memory of the machine, if no control group has a smaller limit.
    Machine(u64),
}

impl MemoryLimit {
    /// Returns the limit at present; `None` if the system does not tell.
    #[must_use]
    pub fn now() -> Option<Self> {
        Self::below(Path::new("/"))
    }

    /// Works like [`Self::now`], with the files of the system below `root`.
    ///
    /// ```
    /// use kvpool::memory::MemoryLimit;
    /// let root = std::env::temp_dir().join(format!("kvpool-limit-{}", std::process::id()));
    /// let group = root.join("sys/fs/cgroup/jobs");
    /// std::fs::create_dir_all(&group).unwrap();
    /// std::fs::create_dir_all(root.join("proc/self")).unwrap();
    /// std::fs::write(root.join("proc/self/cgroup"), "0::/jobs\n").unwrap();
    /// std::fs::write(root.join("proc/meminfo"), "MemTotal:       2048 kB\n").unwrap();
    /// std::fs::write(group.join("memory.max"), "max\n").unwrap();
    /// assert_eq!(MemoryLimit::below(&root), Some(MemoryLimit::Machine(2 << 20)));
    /// std::fs::write(group.join("memory.max"), "1048576\n").unwrap();
    /// assert_eq!(MemoryLimit::below(&root), Some(MemoryLimit::Container(1 << 20)));
    /// # std::fs::remove_dir_all(root).unwrap();
    /// ```
    #[must_use]
    pub fn below(root: &Path) -> Option<Self> {
        let machine = machine_bytes(&root.join("proc/meminfo"));
        let container = limit_files(root).iter().filter_map(|file| number_in(file)).min();
        match (container, machine) {
            (Some(container), machine) if machine.is_none_or(|machine| container < machine) => {
                Some(Self::Container(container))
            }
            (_, machine) => machine.map(Self::Machine),
        }
    }

    /// Returns the limit in bytes.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        match self {
            Self::Container(bytes) | Self::Machine(bytes) => bytes,
        }
    }
}

/// Returns the files with the limits of the control groups of this process, of both versions.
fn limit_files(root: &Path) -> Vec<PathBuf> {
    let mount = root.join("sys/fs/cgroup");
    let mut files = Vec::new();
    for line in read_to_string(root.join("proc/self/cgroup")).unwrap_or_default().lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(number), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next())
        else {
            continue;
        };
        let (name, mounts) = if number == "0" && controllers.is_empty() {
            ("memory.max", vec![mount.clone()])
        } else if controllers.split(',').any(|controller| controller == "memory") {
            // Where several controllers are mounted together, each has a link of its own.
            ("memory.limit_in_bytes", vec![mount.join(controllers), mount.join("memory")])
        } else {
            continue;
        };
        for mount in mounts {
            let mut group = mount;
            files.push(group.join(name));
            for part in path.split('/').filter(|part| !part.is_empty() && *part != "..") {
                group.push(part);
                files.push(group.join(name));
            }
        }
    }
    files
}

/// Returns the number in a file; `None` for "max" and for a file that is missing.
fn number_in(file: &Path) -> Option<u64> {
    read_to_string(file).ok()?.trim().parse().ok()
}

fn machine_bytes(meminfo: &Path) -> Option<u64> {
    let text = read_to_string(meminfo).ok()?;
    let total = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = total.split_whitespace().next()?.parse().ok()?;
    kib.checked_mul(1024)
}
