//! Sizes of the system's pages, which differ between machines: 4, 16 or 64 KiB, and huge ones of 2 MiB to 16
//! GiB.

use std::path::Path;
use std::sync::LazyLock;

/// The directory where the system lists the sizes of explicit huge pages.
const HUGE_PAGES: &str = "/sys/kernel/mm/hugepages";
/// The file with the size of transparent huge pages.
const TRANSPARENT: &str = "/sys/kernel/mm/transparent_hugepage/hpage_pmd_size";

static PAGE: LazyLock<usize> = LazyLock::new(|| {
    // SAFETY: the call reads a constant of the system.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(bytes).ok().filter(|bytes| bytes.is_power_of_two()).expect("POSIX requires a page size")
});

static HUGE: LazyLock<Vec<usize>> = LazyLock::new(|| sizes_in(Path::new(HUGE_PAGES)));

// The size that most machines have, for where /sys is hidden.
static TRANSPARENT_PAGE: LazyLock<usize> =
    LazyLock::new(|| size_in(Path::new(TRANSPARENT)).unwrap_or(2 << 20));

/// Returns the number of bytes of a page, a power of two. Memory is mapped and page-locked in multiples of
/// it.
#[must_use]
pub fn system_page_size() -> usize {
    *PAGE
}

/// Returns the sizes of explicit huge pages that suit a block of `bytes`, the largest first: those which add
/// at most an eighth to it. The system need not have any of them free.
pub(super) fn huge_pages_for(bytes: usize) -> impl Iterator<Item = usize> {
    suitable(&HUGE, bytes)
}

/// Returns the number of bytes of a transparent huge page, a power of two.
pub(super) fn transparent_huge_page_size() -> usize {
    *TRANSPARENT_PAGE
}

fn suitable(sizes: &[usize], bytes: usize) -> impl Iterator<Item = usize> {
    let is_suitable = move |size: usize| {
        bytes.checked_next_multiple_of(size).is_some_and(|mapped| mapped - bytes <= bytes / 8)
    };
    sizes.iter().copied().filter(move |&size| is_suitable(size))
}

/// Returns the sizes that folders such as `hugepages-2048kB` name, the largest first.
fn sizes_in(folder: &Path) -> Vec<usize> {
    let names = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.file_name());
    let mut sizes: Vec<_> = names.filter_map(|name| size_of_name(name.to_str()?)).collect();
    sizes.sort_unstable_by(|one, other| other.cmp(one));
    sizes
}

fn size_of_name(name: &str) -> Option<usize> {
    let kib: usize = name.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()?;
    kib.checked_mul(1024).filter(|bytes| bytes.is_power_of_two())
}

fn size_in(file: &Path) -> Option<usize> {
    let bytes: usize = std::fs::read_to_string(file).ok()?.trim().parse().ok()?;
    bytes.is_power_of_two().then_some(bytes)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::{size_in, sizes_in, suitable, system_page_size};

    #[test]
    fn sizes_are_those_that_the_system_lists() {
        let folder = std::env::temp_dir().join(format!("kvpool-huge-pages-{}", std::process::id()));
        for name in ["hugepages-64kB", "hugepages-1048576kB", "hugepages-2048kB", "hugepages-3kB", "other"] {
            fs::create_dir_all(folder.join(name)).expect("a folder for temporary files");
        }
        assert_eq!(sizes_in(&folder), [1 << 30, 2 << 20, 64 << 10]);
        let file = folder.join("hpage_pmd_size");
        assert_eq!(size_in(&file), None);
        for (text, size) in [("536870912\n", Some(512 << 20)), ("3", None), ("many", None)] {
            fs::write(&file, text).expect("a file there");
            assert_eq!(size_in(&file), size, "{text}");
        }
        fs::remove_dir_all(&folder).expect("it is ours");
        assert!(sizes_in(&folder).is_empty());
    }

    #[test]
    fn pages_are_no_larger_than_a_block_can_use() {
        let sizes = [1 << 30, 2 << 20];
        let suiting = |bytes| suitable(&sizes, bytes).collect::<Vec<_>>();
        assert_eq!(suiting(100 << 30), sizes);
        assert_eq!(suiting((1 << 30) - 1), sizes);
        assert_eq!(suiting((1 << 30) + 1), [2 << 20]);
        assert!(suiting(1 << 20).is_empty());
        assert!(suiting(usize::MAX).is_empty());
        assert!(system_page_size() >= 4096);
    }
}
