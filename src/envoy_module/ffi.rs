//! The boundary to Envoy: its types, the functions that Envoy offers (`callback`), the hooks that Envoy calls (`on`),
//! and the guard that keeps panics out of Envoy. All `unsafe` code of the program is here.
//!
//! The declarations follow the ABI `v0.2.0` of Envoy 1.40. Envoy never changes a released function, so the module can
//! be loaded by later versions. `tests/e2e/inside.rs` compares the names with those that the binary exports.
//!
//! Envoy calls the hooks of one stream on one thread, and passes pointers that it got from `..._new` before, until
//! `..._destroy`. Every safety comment below relies on that.

#![allow(unsafe_code, reason = "Envoy is called, and calls, by C functions with pointers")]

use crate::bootstrap::{self, Bootstrap};
use crate::callbacks::{Answer, Attribute, Callbacks, Chunk, Headers, Metadatum};
use crate::filter::{Filter, FilterConfig, Flow};
use crate::pickers::{Picker, Process};
use crate::settings;
use parking_lot::RwLock;
use std::ffi::{c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{null, null_mut};
use std::sync::Arc;
use std::task::{Wake, Waker};
use tracing::Level;

/// The filter's name in Envoy's configuration.
const FILTER: &[u8] = b"pick";
/// Levels of Envoy's log, from `trace`.
const LEVELS: [Level; 5] = [Level::TRACE, Level::DEBUG, Level::INFO, Level::WARN, Level::ERROR];
/// The first values of Envoy's enums for the outcome of a hook.
const CONTINUE: u32 = 0;
const STOP: u32 = 1;
const STOP_WITHOUT_BUFFER: u32 = 3;
/// Dynamic metadata of the stream, not of a route or a host.
const DYNAMIC: u32 = 0;

/// An object of Envoy.
type Ptr = *mut c_void;
/// An object of the module, which Envoy keeps.
type Object = *const c_void;

/// Bytes of Envoy or of the module.
#[repr(C)]
#[derive(Clone, Copy)]
struct Buffer {
    ptr: *const u8,
    length: usize,
}

/// A header.
#[repr(C)]
#[derive(Clone, Copy)]
struct Pair {
    name: Buffer,
    value: Buffer,
}

type EventCallback = Option<unsafe extern "C" fn(Ptr)>;

const _: () = {
    assert!(size_of::<Buffer>() == 16 && std::mem::offset_of!(Buffer, length) == 8);
    assert!(size_of::<Pair>() == 32 && std::mem::offset_of!(Pair, value) == 16);
    assert!(size_of::<EventCallback>() == 8);
};

/// Functions of Envoy: names and types of the arguments, in one line each.
macro_rules! functions_of_envoy {
    ($($name:ident($($argument:ty),*) $(-> $result:ty)?;)*) => {
        unsafe extern "C" {
            $(fn $name($(_: $argument),*) $(-> $result)?;)*
        }
    };
}

functions_of_envoy! {
    envoy_dynamic_module_callback_is_validation_mode() -> bool;
    envoy_dynamic_module_callback_log_enabled(u32) -> bool;
    envoy_dynamic_module_callback_log_v2(u32, Buffer, Buffer, u32);

    envoy_dynamic_module_callback_http_get_headers_size(Ptr, u32) -> usize;
    envoy_dynamic_module_callback_http_get_headers(Ptr, u32, *mut Pair) -> bool;
    envoy_dynamic_module_callback_http_set_header(Ptr, u32, Buffer, Buffer) -> bool;

    envoy_dynamic_module_callback_http_get_body_size(Ptr, u32) -> usize;
    envoy_dynamic_module_callback_http_get_body_chunks_size(Ptr, u32) -> usize;
    envoy_dynamic_module_callback_http_get_body_chunks(Ptr, u32, *mut Buffer) -> bool;
    envoy_dynamic_module_callback_http_drain_body(Ptr, u32, usize) -> bool;
    envoy_dynamic_module_callback_http_append_body(Ptr, u32, Buffer) -> bool;
    envoy_dynamic_module_callback_http_get_buffer_limit(Ptr) -> u64;
    envoy_dynamic_module_callback_http_set_buffer_limit(Ptr, u64);

    envoy_dynamic_module_callback_http_get_metadata_string(Ptr, u32, Buffer, Buffer, *mut Buffer) -> bool;
    envoy_dynamic_module_callback_http_get_metadata_number(Ptr, u32, Buffer, Buffer, *mut f64) -> bool;
    envoy_dynamic_module_callback_http_get_metadata_bool(Ptr, u32, Buffer, Buffer, *mut bool) -> bool;
    envoy_dynamic_module_callback_http_get_metadata_list_size(Ptr, u32, Buffer, Buffer, *mut usize) -> bool;
    envoy_dynamic_module_callback_http_get_metadata_list_string(Ptr, u32, Buffer, Buffer, usize, *mut Buffer) -> bool;
    envoy_dynamic_module_callback_http_set_dynamic_metadata_string(Ptr, Buffer, Buffer, Buffer);
    envoy_dynamic_module_callback_http_set_dynamic_metadata_number(Ptr, Buffer, Buffer, f64);

    envoy_dynamic_module_callback_http_filter_get_attribute_string(Ptr, u32, *mut Buffer) -> bool;
    envoy_dynamic_module_callback_http_filter_get_attribute_int(Ptr, u32, *mut u64) -> bool;

    envoy_dynamic_module_callback_http_clear_route_cache(Ptr);
    envoy_dynamic_module_callback_http_filter_continue_decoding(Ptr);
    envoy_dynamic_module_callback_http_send_response(Ptr, u32, *mut Pair, usize, Buffer, Buffer);

    envoy_dynamic_module_callback_http_filter_scheduler_new(Ptr) -> Ptr;
    envoy_dynamic_module_callback_http_filter_scheduler_commit(Ptr, u64);
    envoy_dynamic_module_callback_http_filter_scheduler_delete(Ptr);

    envoy_dynamic_module_callback_bootstrap_extension_config_scheduler_new(Ptr) -> Ptr;
    envoy_dynamic_module_callback_bootstrap_extension_config_scheduler_commit(Ptr, u64);
    envoy_dynamic_module_callback_bootstrap_extension_config_scheduler_delete(Ptr);
    envoy_dynamic_module_callback_bootstrap_extension_config_signal_init_complete(Ptr);
}

impl Buffer {
    const EMPTY: Self = Self { ptr: null(), length: 0 };

    fn of(bytes: &[u8]) -> Self {
        Self { ptr: bytes.as_ptr(), length: bytes.len() }
    }

    /// The bytes, for as long as `self` is borrowed. The caller must not call a setter of Envoy meanwhile.
    fn bytes(&self) -> &[u8] {
        if self.ptr.is_null() || self.length == 0 {
            return &[];
        }
        // SAFETY: Envoy's buffers are valid until the hook returns or a setter is called.
        unsafe { std::slice::from_raw_parts(self.ptr, self.length) }
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(self.bytes()).into_owned()
    }
}

/// Envoy's filter of one stream, during a hook of that stream.
struct Envoy(Ptr);

/// What a function of Envoy wrote, if it says that it wrote.
fn written<T>(mut value: T, write: impl FnOnce(&mut T) -> bool) -> Option<T> {
    write(&mut value).then_some(value)
}

// SAFETY of all calls here: the pointer is that of the running hook, and buffers are valid until the call returns.
impl Callbacks for Envoy {
    fn headers(&self, of: Headers) -> Vec<(String, Vec<u8>)> {
        // SAFETY: see above.
        let count = unsafe { envoy_dynamic_module_callback_http_get_headers_size(self.0, of as u32) };
        let mut pairs = vec![Pair { name: Buffer::EMPTY, value: Buffer::EMPTY }; count];
        // SAFETY: there is space for all headers.
        if !unsafe { envoy_dynamic_module_callback_http_get_headers(self.0, of as u32, pairs.as_mut_ptr()) } {
            return Vec::new();
        }
        pairs.iter().map(|pair| (pair.name.text(), pair.value.bytes().to_vec())).collect()
    }

    fn set_header(&self, of: Headers, name: &str, value: &[u8]) {
        let (name, value) = (Buffer::of(name.as_bytes()), Buffer::of(value));
        // SAFETY: see above. An empty slice has a pointer, so it sets an empty value.
        unsafe { envoy_dynamic_module_callback_http_set_header(self.0, of as u32, name, value) };
    }

    fn remove_header(&self, of: Headers, name: &str) {
        let name = Buffer::of(name.as_bytes());
        // SAFETY: see above. A null value removes the header.
        unsafe { envoy_dynamic_module_callback_http_set_header(self.0, of as u32, name, Buffer::EMPTY) };
    }

    fn body(&self, chunk: Chunk) -> Vec<u8> {
        // SAFETY: see above.
        let count = unsafe { envoy_dynamic_module_callback_http_get_body_chunks_size(self.0, chunk as u32) };
        let mut parts = vec![Buffer::EMPTY; count];
        // SAFETY: there is space for all parts.
        if !unsafe { envoy_dynamic_module_callback_http_get_body_chunks(self.0, chunk as u32, parts.as_mut_ptr()) } {
            return Vec::new();
        }
        let mut bytes = Vec::with_capacity(parts.iter().map(|part| part.length).sum());
        parts.iter().for_each(|part| bytes.extend_from_slice(part.bytes()));
        bytes
    }

    fn replace_body(&self, chunk: Chunk, bytes: &[u8]) {
        let length = self.body_len(chunk);
        if length > 0 {
            // SAFETY: see above.
            unsafe { envoy_dynamic_module_callback_http_drain_body(self.0, chunk as u32, length) };
        }
        if !bytes.is_empty() {
            // SAFETY: see above.
            unsafe { envoy_dynamic_module_callback_http_append_body(self.0, chunk as u32, Buffer::of(bytes)) };
        }
    }

    fn body_len(&self, chunk: Chunk) -> usize {
        // SAFETY: see above.
        unsafe { envoy_dynamic_module_callback_http_get_body_size(self.0, chunk as u32) }
    }

    fn metadata(&self, namespace: &str, key: &str) -> Option<Metadatum> {
        let (filter, namespace, key) = (self.0, Buffer::of(namespace.as_bytes()), Buffer::of(key.as_bytes()));
        let text = written(Buffer::EMPTY, |out| {
            // SAFETY: see above.
            unsafe { envoy_dynamic_module_callback_http_get_metadata_string(filter, DYNAMIC, namespace, key, out) }
        });
        if let Some(text) = text {
            return Some(Metadatum::Text(text.text()));
        }
        let count = written(0, |out| {
            // SAFETY: see above.
            unsafe { envoy_dynamic_module_callback_http_get_metadata_list_size(filter, DYNAMIC, namespace, key, out) }
        });
        if let Some(count) = count {
            let element = |index| {
                written(Buffer::EMPTY, |out| {
                    // SAFETY: see above.
                    unsafe {
                        envoy_dynamic_module_callback_http_get_metadata_list_string(
                            filter, DYNAMIC, namespace, key, index, out,
                        )
                    }
                })
            };
            return Some(Metadatum::Texts((0..count).map(|index| element(index).map(|text| text.text())).collect()));
        }
        let number = written(0.0, |out| {
            // SAFETY: see above.
            unsafe { envoy_dynamic_module_callback_http_get_metadata_number(filter, DYNAMIC, namespace, key, out) }
        });
        let truth = || {
            written(false, |out| {
                // SAFETY: see above.
                unsafe { envoy_dynamic_module_callback_http_get_metadata_bool(filter, DYNAMIC, namespace, key, out) }
            })
        };
        number.map(Metadatum::Number).or_else(|| truth().map(Metadatum::Bool))
    }

    fn set_metadata(&self, namespace: &str, key: &str, value: &str) {
        let [namespace, key, value] = [namespace, key, value].map(|text| Buffer::of(text.as_bytes()));
        // SAFETY: see above.
        unsafe { envoy_dynamic_module_callback_http_set_dynamic_metadata_string(self.0, namespace, key, value) };
    }

    fn set_metadata_number(&self, namespace: &str, key: &str, value: f64) {
        let [namespace, key] = [namespace, key].map(|text| Buffer::of(text.as_bytes()));
        // SAFETY: see above.
        unsafe { envoy_dynamic_module_callback_http_set_dynamic_metadata_number(self.0, namespace, key, value) };
    }

    fn text(&self, attribute: Attribute) -> Option<String> {
        let text = written(Buffer::EMPTY, |out| {
            // SAFETY: see above.
            unsafe { envoy_dynamic_module_callback_http_filter_get_attribute_string(self.0, attribute as u32, out) }
        });
        text.map(|text| text.text())
    }

    fn number(&self, attribute: Attribute) -> Option<u64> {
        // SAFETY: see above.
        written(0, |out| unsafe {
            envoy_dynamic_module_callback_http_filter_get_attribute_int(self.0, attribute as u32, out)
        })
    }

    fn raise_buffer_limit(&self, bytes: u64) {
        // SAFETY: see above.
        let limit = unsafe { envoy_dynamic_module_callback_http_get_buffer_limit(self.0) };
        // 0 is no limit.
        if limit != 0 && limit < bytes {
            // SAFETY: see above.
            unsafe { envoy_dynamic_module_callback_http_set_buffer_limit(self.0, bytes) };
        }
    }

    fn clear_route_cache(&self) {
        // SAFETY: see above.
        unsafe { envoy_dynamic_module_callback_http_clear_route_cache(self.0) };
    }

    fn waker(&self) -> Waker {
        // SAFETY: see above. The scheduler outlives the stream, until it is deleted.
        Waker::from(Arc::new(Scheduler(unsafe { envoy_dynamic_module_callback_http_filter_scheduler_new(self.0) })))
    }

    fn send(&self, answer: &Answer) {
        let pair =
            |(name, value): &(String, Vec<u8>)| Pair { name: Buffer::of(name.as_bytes()), value: Buffer::of(value) };
        let mut headers: Vec<Pair> = answer.headers.iter().map(pair).collect();
        let (body, details) = (Buffer::of(&answer.body), Buffer::of(answer.details.as_bytes()));
        let (first, count) = (headers.as_mut_ptr(), headers.len());
        // SAFETY: see above. The caller holds no borrow that a hook of this stream needs.
        unsafe {
            envoy_dynamic_module_callback_http_send_response(self.0, answer.status, first, count, body, details);
        }
    }

    fn continue_request(&self) {
        // SAFETY: see above. The caller holds no borrow that a hook of this stream needs.
        unsafe { envoy_dynamic_module_callback_http_filter_continue_decoding(self.0) };
    }
}

/// Whether Envoy ends. From then on, no thread may make a worker run something: the worker may be gone.
static ENDING: RwLock<bool> = RwLock::new(false);

/// Lets a worker call `scheduled` of a filter.
struct Scheduler(Ptr);

// SAFETY: Envoy allows `commit` and `delete` on any thread, also after the end of the stream.
unsafe impl Send for Scheduler {}
// SAFETY: as above.
unsafe impl Sync for Scheduler {}

impl Wake for Scheduler {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let ending = ENDING.read();
        if !*ending {
            // SAFETY: the scheduler is deleted on drop only.
            unsafe { envoy_dynamic_module_callback_http_filter_scheduler_commit(self.0, 0) };
        }
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        // SAFETY: it is deleted once.
        unsafe { envoy_dynamic_module_callback_http_filter_scheduler_delete(self.0) };
    }
}

/// Lets the main thread call `scheduled` of the bootstrap extension.
struct MainScheduler(Ptr);

// SAFETY: Envoy allows `commit` and `delete` on any thread.
unsafe impl Send for MainScheduler {}

impl MainScheduler {
    fn commit(&self) {
        let ending = ENDING.read();
        if !*ending {
            // SAFETY: the scheduler is deleted on drop only.
            unsafe { envoy_dynamic_module_callback_bootstrap_extension_config_scheduler_commit(self.0, 0) };
        }
    }
}

impl Drop for MainScheduler {
    fn drop(&mut self) {
        // SAFETY: it is deleted once.
        unsafe { envoy_dynamic_module_callback_bootstrap_extension_config_scheduler_delete(self.0) };
    }
}

fn write_log(level: Level, text: &str) {
    let level = LEVELS.iter().position(|known| *known == level).unwrap_or_default() as u32;
    // SAFETY: Envoy allows these calls on any thread.
    unsafe {
        if envoy_dynamic_module_callback_log_enabled(level) {
            envoy_dynamic_module_callback_log_v2(level, Buffer::of(text.as_bytes()), Buffer::of(b"attache"), 0);
        }
    }
}

fn block_signals() {
    // SAFETY: both functions write to the set, which is valid.
    unsafe {
        let mut all = std::mem::zeroed::<libc::sigset_t>();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_BLOCK, &all, null_mut());
    }
}

/// The process of Envoy. Call it on the main thread.
fn process() -> Process {
    // SAFETY: the main thread calls this.
    let validates = unsafe { envoy_dynamic_module_callback_is_validation_mode() };
    Process { validates, block_signals, write_log }
}

/// Runs `hook`; `otherwise` after a panic, which the panic hook has logged.
fn guarded<T>(otherwise: T, hook: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(hook)).unwrap_or(otherwise)
}

/// A new object for Envoy; null after an error, which rejects the configuration.
fn created<T>(hook: impl FnOnce() -> Result<T, String>) -> Object {
    guarded(null(), || match hook() {
        Ok(object) => Box::into_raw(Box::new(object)).cast_const().cast(),
        Err(error) => {
            write_log(Level::ERROR, &error);
            null()
        }
    })
}

/// Drops an object of [`created`].
fn destroyed<T>(object: Object) {
    // SAFETY: `created` made it, and Envoy passes it once.
    guarded((), || drop(unsafe { Box::from_raw(object.cast_mut().cast::<T>()) }));
}

/// Runs a hook of a stream. After a panic, the stream passes without Attaché.
fn in_stream(envoy: Ptr, filter: Object, hook: impl FnOnce(&Filter, &Envoy) -> Flow) -> Flow {
    // SAFETY: `created` made it. Hooks of one stream run on one thread and share it: a hook can run inside another.
    let filter = unsafe { &*filter.cast::<Filter>() };
    let began = filter.now();
    let caught = catch_unwind(AssertUnwindSafe(|| hook(filter, &Envoy(envoy))));
    guarded((), || filter.hook_ended(began, caught.is_err()));
    caught.unwrap_or(Flow::Continue)
}

fn headers_status(flow: Flow) -> u32 {
    if flow == Flow::Continue { CONTINUE } else { STOP }
}

fn body_status(flow: Flow) -> u32 {
    match flow {
        Flow::Continue => CONTINUE,
        Flow::Hold => STOP,
        Flow::Discard => STOP_WITHOUT_BUFFER,
    }
}

// === hooks of the program and the bootstrap extension ===

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_program_init() -> *const c_char {
    c"v0.2.0".as_ptr()
}

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_bootstrap_extension_config_new(
    envoy: Ptr,
    _name: Buffer,
    config: Buffer,
) -> Object {
    created(|| {
        let bootstrap = Bootstrap::open(&settings::read(config.bytes())?, process())?;
        // SAFETY: this is the main thread.
        let scheduler =
            MainScheduler(unsafe { envoy_dynamic_module_callback_bootstrap_extension_config_scheduler_new(envoy) });
        bootstrap.when_ready(move || scheduler.commit());
        Ok(bootstrap)
    })
}

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_bootstrap_extension_config_destroy(config: Object) {
    destroyed::<Bootstrap>(config);
}

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_bootstrap_extension_config_scheduled(envoy: Ptr, _config: Object, _event: u64) {
    // SAFETY: this is the main thread.
    unsafe { envoy_dynamic_module_callback_bootstrap_extension_config_signal_init_complete(envoy) };
}

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_bootstrap_extension_new(config: Object, _envoy: Ptr) -> Object {
    config
}

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_bootstrap_extension_shutdown(
    _envoy: Ptr,
    _extension: Object,
    done: EventCallback,
    context: Ptr,
) {
    *ENDING.write() = true;
    guarded((), bootstrap::shutdown);
    if let Some(done) = done {
        // SAFETY: Envoy waits for this call.
        unsafe { done(context) };
    }
}

// === hooks of the HTTP filter ===

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_http_filter_config_new(_envoy: Ptr, name: Buffer, config: Buffer) -> Object {
    created(|| {
        if name.bytes() != FILTER {
            return Err(format!("no filter {:?}; `filter_name` must be `pick`", name.text()));
        }
        let settings: settings::FilterSettings = settings::read(config.bytes())?;
        let picker = Picker::open(&settings.config_file, settings.outputs(), process())?;
        Ok(Arc::new(FilterConfig::new(picker, &settings)))
    })
}

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_http_filter_config_destroy(config: Object) {
    destroyed::<Arc<FilterConfig>>(config);
}

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_http_filter_new(config: Object, _envoy: Ptr) -> Object {
    // SAFETY: `config_new` made it.
    created(|| Ok(Filter::new(unsafe { &*config.cast::<Arc<FilterConfig>>() }.clone())))
}

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_http_filter_destroy(filter: Object) {
    destroyed::<Filter>(filter);
}

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_http_filter_request_headers(envoy: Ptr, filter: Object, end: bool) -> u32 {
    headers_status(in_stream(envoy, filter, |filter, envoy| filter.request_headers(envoy, end)))
}

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_http_filter_request_body(envoy: Ptr, filter: Object, end: bool) -> u32 {
    body_status(in_stream(envoy, filter, |filter, envoy| filter.request_body(envoy, end)))
}

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_http_filter_request_trailers(envoy: Ptr, filter: Object) -> u32 {
    headers_status(in_stream(envoy, filter, |filter, envoy| filter.request_trailers(envoy)))
}

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_http_filter_response_headers(envoy: Ptr, filter: Object, end: bool) -> u32 {
    headers_status(in_stream(envoy, filter, |filter, envoy| filter.response_headers(envoy, end)))
}

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_http_filter_response_body(envoy: Ptr, filter: Object, end: bool) -> u32 {
    body_status(in_stream(envoy, filter, |filter, envoy| filter.response_body(envoy, end)))
}

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_http_filter_response_trailers(envoy: Ptr, filter: Object) -> u32 {
    headers_status(in_stream(envoy, filter, |filter, envoy| filter.response_trailers(envoy)))
}

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_http_filter_scheduled(envoy: Ptr, filter: Object, _event: u64) {
    // SAFETY: as in `in_stream`.
    let held = guarded(false, || unsafe { &*filter.cast::<Filter>() }.holds());
    let flow = in_stream(envoy, filter, |filter, envoy| filter.scheduled(envoy));
    if held && flow == Flow::Continue {
        Envoy(envoy).continue_request();
    }
}

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_http_filter_stream_complete(envoy: Ptr, filter: Object) {
    in_stream(envoy, filter, |filter, _| {
        filter.complete();
        Flow::Continue
    });
}

/// Hooks that Envoy requires, of functions that the module does not use.
macro_rules! unused_hooks {
    ($($name:ident($($argument:ty),*) $(-> $result:ty = $value:expr)?;)*) => {
        $(
            #[unsafe(no_mangle)]
            extern "C" fn $name($(_: $argument),*) $(-> $result)? {
                $($value)?
            }
        )*
    };
}

unused_hooks! {
    envoy_dynamic_module_on_bootstrap_extension_destroy(Object);
    envoy_dynamic_module_on_bootstrap_extension_server_initialized(Ptr, Object);
    envoy_dynamic_module_on_bootstrap_extension_worker_thread_initialized(Ptr, Object);
    envoy_dynamic_module_on_bootstrap_extension_drain_started(Ptr, Object);
    envoy_dynamic_module_on_bootstrap_extension_http_callout_done(
        Ptr, Object, u64, u32, *const Pair, usize, *const Buffer, usize);
    envoy_dynamic_module_on_bootstrap_extension_timer_fired(Ptr, Object, Ptr);
    envoy_dynamic_module_on_bootstrap_extension_file_changed(Ptr, Object, Buffer, u32);
    envoy_dynamic_module_on_bootstrap_extension_admin_request(Ptr, Object, Buffer, Buffer, Buffer) -> u32 = 404;
    envoy_dynamic_module_on_bootstrap_extension_cluster_add_or_update(Ptr, Object, Buffer);
    envoy_dynamic_module_on_bootstrap_extension_cluster_removal(Ptr, Object, Buffer);
    envoy_dynamic_module_on_bootstrap_extension_listener_add_or_update(Ptr, Object, Buffer);
    envoy_dynamic_module_on_bootstrap_extension_listener_removal(Ptr, Object, Buffer);
    envoy_dynamic_module_on_http_filter_http_callout_done(
        Ptr, Object, u64, u32, *mut Pair, usize, *mut Buffer, usize);
    envoy_dynamic_module_on_http_filter_http_stream_headers(Ptr, Object, u64, *mut Pair, usize, bool);
    envoy_dynamic_module_on_http_filter_http_stream_data(Ptr, Object, u64, *const Buffer, usize, bool);
    envoy_dynamic_module_on_http_filter_http_stream_trailers(Ptr, Object, u64, *mut Pair, usize);
    envoy_dynamic_module_on_http_filter_http_stream_complete(Ptr, Object, u64);
    envoy_dynamic_module_on_http_filter_http_stream_reset(Ptr, Object, u64, u32);
    envoy_dynamic_module_on_http_filter_downstream_above_write_buffer_high_watermark(Ptr, Object);
    envoy_dynamic_module_on_http_filter_downstream_below_write_buffer_low_watermark(Ptr, Object);
}
