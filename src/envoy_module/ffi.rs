//! The boundary to Envoy: its types, the functions that Envoy offers (`callback`), the hooks that Envoy calls (`on`),
//! and the guard that keeps panics out of Envoy. All `unsafe` code of the program is here.
//!
//! The declarations follow the ABI `v0.2.0` of Envoy 1.40. Envoy never changes a released function, so the module can
//! be loaded by later versions. `tests/e2e/inside.rs` compares the names with those that the binary exports.
//!
//! Envoy calls the hooks of one stream on one thread, and passes pointers that it got from `..._new` before, until
//! `..._destroy`. Every safety comment below relies on that.

#![allow(unsafe_code, reason = "Envoy is called, and calls, by C functions with pointers")]

use crate::bootstrap::{self, Bootstrap, METRICS_PATH};
use crate::callbacks::{Answer, Attribute, Callbacks, Chunk, Headers, Metadatum};
use crate::cluster::{Cluster, ClusterConfig, Host, HostList};
use crate::filters::StreamConfig;
use crate::pickers::Process;
use crate::settings;
use crate::stream::{Flow, StreamFilter};
use parking_lot::RwLock;
use std::ffi::{c_char, c_void};
use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{null, null_mut};
use std::sync::Arc;
use std::task::{Wake, Waker};
use tracing::Level;

/// Levels of Envoy's log, from `trace`.
const LEVELS: [Level; 5] = [Level::TRACE, Level::DEBUG, Level::INFO, Level::WARN, Level::ERROR];
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

/// Functions of Envoy: names behind `envoy_dynamic_module_callback_`, and types of the arguments.
macro_rules! functions_of_envoy {
    ($($name:ident($($argument:ty),*) $(-> $result:ty)?;)*) => {
        unsafe extern "C" {
            $(
                #[link_name = concat!("envoy_dynamic_module_callback_", stringify!($name))]
                fn $name($(_: $argument),*) $(-> $result)?;
            )*
        }
    };
}

functions_of_envoy! {
    is_validation_mode() -> bool;
    log_enabled(u32) -> bool;
    log_v2(u32, Buffer, Buffer, u32);

    http_get_headers_size(Ptr, u32) -> usize;
    http_get_headers(Ptr, u32, *mut Pair) -> bool;
    http_set_header(Ptr, u32, Buffer, Buffer) -> bool;

    http_get_body_size(Ptr, u32) -> usize;
    http_get_body_chunks_size(Ptr, u32) -> usize;
    http_get_body_chunks(Ptr, u32, *mut Buffer) -> bool;
    http_drain_body(Ptr, u32, usize) -> bool;
    http_append_body(Ptr, u32, Buffer) -> bool;
    http_get_buffer_limit(Ptr) -> u64;
    http_set_buffer_limit(Ptr, u64);

    http_get_metadata_string(Ptr, u32, Buffer, Buffer, *mut Buffer) -> bool;
    http_get_metadata_number(Ptr, u32, Buffer, Buffer, *mut f64) -> bool;
    http_get_metadata_bool(Ptr, u32, Buffer, Buffer, *mut bool) -> bool;
    http_get_metadata_list_size(Ptr, u32, Buffer, Buffer, *mut usize) -> bool;
    http_get_metadata_list_string(Ptr, u32, Buffer, Buffer, usize, *mut Buffer) -> bool;
    http_set_dynamic_metadata_string(Ptr, Buffer, Buffer, Buffer);
    http_set_dynamic_metadata_number(Ptr, Buffer, Buffer, f64);

    http_filter_get_attribute_string(Ptr, u32, *mut Buffer) -> bool;
    http_filter_get_attribute_int(Ptr, u32, *mut u64) -> bool;

    http_clear_route_cache(Ptr);
    http_filter_continue_decoding(Ptr);
    http_send_response(Ptr, u32, *mut Pair, usize, Buffer, Buffer);

    http_filter_scheduler_new(Ptr) -> Ptr;
    http_filter_scheduler_commit(Ptr, u64);
    http_filter_scheduler_delete(Ptr);

    bootstrap_extension_config_scheduler_new(Ptr) -> Ptr;
    bootstrap_extension_config_scheduler_commit(Ptr, u64);
    bootstrap_extension_config_scheduler_delete(Ptr);
    bootstrap_extension_config_signal_init_complete(Ptr);
    bootstrap_extension_register_admin_handler(Ptr, Buffer, Buffer, bool, bool) -> bool;
    bootstrap_extension_admin_set_response(Ptr, Buffer);

    cluster_add_hosts(
        Ptr, u32, *const Buffer, *const u32, *const Buffer, *const Buffer, *const Buffer, *const Buffer, usize, usize,
        *mut Ptr) -> bool;
    cluster_remove_hosts(Ptr, *const Ptr, usize) -> usize;
    cluster_pre_init_complete(Ptr);
    cluster_scheduler_new(Ptr) -> Ptr;
    cluster_scheduler_commit(Ptr, u64);
    cluster_scheduler_delete(Ptr);
}

/// Calls a function of Envoy: one that any thread may call, or one for the object of the running hook.
macro_rules! ask {
    ($function:ident($($argument:expr),*)) => {
        // SAFETY: hooks run on the thread of their object, and buffers are valid until the call returns.
        unsafe { $function($($argument),*) }
    };
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
        String::from_utf8(self.bytes().into()).unwrap_or_else(|e| String::from_utf8_lossy(e.as_bytes()).into_owned())
    }
}

/// Envoy's filter of one stream, during a hook of that stream.
struct Envoy(Ptr);

/// What a function of Envoy wrote, if it says that it wrote.
fn written<T>(mut value: T, write: impl FnOnce(&mut T) -> bool) -> Option<T> {
    write(&mut value).then_some(value)
}

impl Callbacks for Envoy {
    fn headers(&self, of: Headers) -> Vec<(String, Vec<u8>)> {
        let count = ask!(http_get_headers_size(self.0, of as u32));
        let mut pairs = vec![Pair { name: Buffer::EMPTY, value: Buffer::EMPTY }; count];
        // There is space for all.
        if !ask!(http_get_headers(self.0, of as u32, pairs.as_mut_ptr())) {
            return Vec::new();
        }
        pairs.iter().map(|pair| (pair.name.text(), pair.value.bytes().to_vec())).collect()
    }

    fn set_header(&self, of: Headers, name: &str, value: &[u8]) {
        let (name, value) = (Buffer::of(name.as_bytes()), Buffer::of(value));
        // An empty slice has a pointer, so it sets an empty value.
        ask!(http_set_header(self.0, of as u32, name, value));
    }

    fn remove_header(&self, of: Headers, name: &str) {
        let name = Buffer::of(name.as_bytes());
        // A null value removes the header.
        ask!(http_set_header(self.0, of as u32, name, Buffer::EMPTY));
    }

    fn body(&self, chunk: Chunk) -> Vec<u8> {
        let count = ask!(http_get_body_chunks_size(self.0, chunk as u32));
        let mut parts = vec![Buffer::EMPTY; count];
        // There is space for all.
        if !ask!(http_get_body_chunks(self.0, chunk as u32, parts.as_mut_ptr())) {
            return Vec::new();
        }
        let mut bytes = Vec::with_capacity(parts.iter().map(|part| part.length).sum());
        parts.iter().for_each(|part| bytes.extend_from_slice(part.bytes()));
        bytes
    }

    fn replace_body(&self, chunk: Chunk, bytes: &[u8]) {
        let length = self.body_len(chunk);
        if length > 0 {
            ask!(http_drain_body(self.0, chunk as u32, length));
        }
        if !bytes.is_empty() {
            ask!(http_append_body(self.0, chunk as u32, Buffer::of(bytes)));
        }
    }

    fn body_len(&self, chunk: Chunk) -> usize {
        ask!(http_get_body_size(self.0, chunk as u32))
    }

    fn metadata(&self, namespace: &str, key: &str) -> Option<Metadatum> {
        let (filter, namespace, key) = (self.0, Buffer::of(namespace.as_bytes()), Buffer::of(key.as_bytes()));
        let text = written(Buffer::EMPTY, |out| ask!(http_get_metadata_string(filter, DYNAMIC, namespace, key, out)));
        if let Some(text) = text {
            return Some(Metadatum::Text(text.text()));
        }
        let count = written(0, |out| ask!(http_get_metadata_list_size(filter, DYNAMIC, namespace, key, out)));
        if let Some(count) = count {
            let element = |index| {
                written(Buffer::EMPTY, |out| {
                    ask!(http_get_metadata_list_string(filter, DYNAMIC, namespace, key, index, out))
                })
            };
            return Some(Metadatum::Texts((0..count).map(|index| element(index).map(|text| text.text())).collect()));
        }
        let number = written(0.0, |out| ask!(http_get_metadata_number(filter, DYNAMIC, namespace, key, out)));
        let truth = || written(false, |out| ask!(http_get_metadata_bool(filter, DYNAMIC, namespace, key, out)));
        number.map(Metadatum::Number).or_else(|| truth().map(Metadatum::Bool))
    }

    fn set_metadata(&self, namespace: &str, key: &str, value: &str) {
        let [namespace, key, value] = [namespace, key, value].map(|text| Buffer::of(text.as_bytes()));
        ask!(http_set_dynamic_metadata_string(self.0, namespace, key, value));
    }

    fn set_metadata_number(&self, namespace: &str, key: &str, value: f64) {
        let [namespace, key] = [namespace, key].map(|text| Buffer::of(text.as_bytes()));
        ask!(http_set_dynamic_metadata_number(self.0, namespace, key, value));
    }

    fn text(&self, attribute: Attribute) -> Option<String> {
        let text = written(Buffer::EMPTY, |out| ask!(http_filter_get_attribute_string(self.0, attribute as u32, out)));
        text.map(|text| text.text())
    }

    fn number(&self, attribute: Attribute) -> Option<u64> {
        written(0, |out| ask!(http_filter_get_attribute_int(self.0, attribute as u32, out)))
    }

    fn raise_buffer_limit(&self, bytes: u64) {
        let limit = ask!(http_get_buffer_limit(self.0));
        // 0 is no limit.
        if limit != 0 && limit < bytes {
            ask!(http_set_buffer_limit(self.0, bytes));
        }
    }

    fn clear_route_cache(&self) {
        ask!(http_clear_route_cache(self.0));
    }

    fn waker(&self) -> Waker {
        let (commit, delete) = (http_filter_scheduler_commit, http_filter_scheduler_delete);
        Waker::from(Arc::new(Scheduler { object: ask!(http_filter_scheduler_new(self.0)), commit, delete }))
    }

    fn send(&self, answer: &Answer) {
        let pair =
            |(name, value): &(String, Vec<u8>)| Pair { name: Buffer::of(name.as_bytes()), value: Buffer::of(value) };
        let mut headers: Vec<Pair> = answer.headers.iter().map(pair).collect();
        let (body, details) = (Buffer::of(&answer.body), Buffer::of(answer.details.as_bytes()));
        let (first, count) = (headers.as_mut_ptr(), headers.len());
        ask!(http_send_response(self.0, answer.status, first, count, body, details));
    }

    fn continue_request(&self) {
        ask!(http_filter_continue_decoding(self.0));
    }
}

/// Whether Envoy ends. From then on, no thread may make a worker run something: the worker may be gone.
static ENDING: RwLock<bool> = RwLock::new(false);

/// Lets the thread of an object of Envoy call its hook `scheduled`.
struct Scheduler {
    object: Ptr,
    commit: unsafe extern "C" fn(Ptr, u64),
    delete: unsafe extern "C" fn(Ptr),
}

// SAFETY: Envoy allows `commit` and `delete` on any thread, also after the end of the object.
unsafe impl Send for Scheduler {}
// SAFETY: as above.
unsafe impl Sync for Scheduler {}

impl Scheduler {
    fn schedule(&self) {
        let ending = ENDING.read();
        if !*ending {
            // SAFETY: the scheduler is deleted on drop only.
            unsafe { (self.commit)(self.object, 0) };
        }
    }
}

impl Wake for Scheduler {
    fn wake(self: Arc<Self>) {
        self.schedule();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.schedule();
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        // SAFETY: it is deleted once.
        unsafe { (self.delete)(self.object) };
    }
}

/// A cluster of Envoy, during a hook on the main thread.
struct EnvoyCluster(Ptr);

impl HostList for EnvoyCluster {
    fn add(&self, servers: &[SocketAddr]) -> Option<Vec<Host>> {
        let texts: Vec<String> = servers.iter().map(ToString::to_string).collect();
        let addresses: Vec<Buffer> = texts.iter().map(|text| Buffer::of(text.as_bytes())).collect();
        let (weights, nowhere) = (vec![1; servers.len()], vec![Buffer::EMPTY; servers.len()]);
        let (nowhere, mut hosts) = (nowhere.as_ptr(), vec![null_mut(); servers.len()]);
        let (addresses, weights, result) = (addresses.as_ptr(), weights.as_ptr(), hosts.as_mut_ptr());
        // Without metadata. All lists have an item for each server: address, weight, region, zone, sub-zone, result.
        let is_added = ask! { cluster_add_hosts(
        self.0, 0, addresses, weights, nowhere, nowhere, nowhere, null(), 0, servers.len(), result) };
        is_added.then(|| hosts.into_iter().map(|host| Host(host.expose_provenance())).collect())
    }

    fn remove(&self, hosts: &[Host]) {
        let hosts: Vec<Ptr> = hosts.iter().map(|host| std::ptr::with_exposed_provenance_mut(host.0)).collect();
        ask!(cluster_remove_hosts(self.0, hosts.as_ptr(), hosts.len()));
    }

    fn end_start(&self) {
        ask!(cluster_pre_init_complete(self.0));
    }
}

fn write_log(level: Level, text: &str) {
    let level = LEVELS.iter().position(|known| *known == level).unwrap_or_default() as u32;
    if ask!(log_enabled(level)) {
        ask!(log_v2(level, Buffer::of(text.as_bytes()), Buffer::of(b"attache"), 0));
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
    Process { validates: ask!(is_validation_mode()), block_signals, write_log }
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

/// Runs a hook of a stream.
fn in_stream(envoy: Ptr, filter: Object, hook: impl FnOnce(&dyn StreamFilter, &Envoy) -> Flow) -> Flow {
    // SAFETY: `created` made it. Hooks of one stream run on one thread and share it: a hook can run inside another.
    let filter = unsafe { &**filter.cast::<Box<dyn StreamFilter>>() };
    let began = filter.now();
    let caught = catch_unwind(AssertUnwindSafe(|| hook(filter, &Envoy(envoy))));
    let flow = caught.unwrap_or_else(|_| guarded(Flow::Continue, || filter.panicked(&Envoy(envoy))));
    guarded((), || filter.hook_ended(began));
    flow
}

/// Hooks that Envoy calls: names behind `envoy_dynamic_module_on_`.
macro_rules! hooks {
    ($(fn $name:ident($($argument:tt: $t:ty),*) $(-> $result:ty)? $body:block)*) => {
        $(
            #[unsafe(export_name = concat!("envoy_dynamic_module_on_", stringify!($name)))]
            extern "C" fn $name($($argument: $t),*) $(-> $result)? $body
        )*
    };
}

// === hooks of the program and the bootstrap extension ===

hooks! {
    fn program_init() -> *const c_char {
        c"v0.2.0".as_ptr()
    }

    fn bootstrap_extension_config_new(envoy: Ptr, _name: Buffer, config: Buffer) -> Object {
        created(|| {
            let bootstrap = Bootstrap::open(&settings::read(config.bytes())?, process())?;
            let object = ask!(bootstrap_extension_config_scheduler_new(envoy));
            let commit = bootstrap_extension_config_scheduler_commit;
            let scheduler = Scheduler { object, commit, delete: bootstrap_extension_config_scheduler_delete };
            bootstrap.when_ready(move || scheduler.schedule());
            let (path, help) = (Buffer::of(METRICS_PATH.as_bytes()), Buffer::of(b"metrics of Attache"));
            // Envoy may have no admin port. Another extension may have the page.
            ask!(bootstrap_extension_register_admin_handler(envoy, path, help, true, false));
            Ok(bootstrap)
        })
    }

    fn bootstrap_extension_config_destroy(config: Object) {
        destroyed::<Bootstrap>(config);
    }

    fn bootstrap_extension_config_scheduled(envoy: Ptr, _config: Object, _event: u64) {
        ask!(bootstrap_extension_config_signal_init_complete(envoy));
    }

    fn bootstrap_extension_new(config: Object, _envoy: Ptr) -> Object {
        config
    }

    fn bootstrap_extension_admin_request(
        envoy: Ptr, config: Object, _method: Buffer, _path: Buffer, _body: Buffer) -> u32 {
        // SAFETY: `config_new` made it.
        let metrics = guarded(None, || unsafe { &*config.cast::<Bootstrap>() }.metrics());
        let (status, text) = metrics.map_or((503, "no metrics yet\n".to_owned()), |text| (200, text));
        ask!(bootstrap_extension_admin_set_response(envoy, Buffer::of(text.as_bytes())));
        status
    }

    fn bootstrap_extension_shutdown(_envoy: Ptr, _extension: Object, done: EventCallback, context: Ptr) {
        *ENDING.write() = true;
        guarded((), bootstrap::shutdown);
        if let Some(done) = done {
            // SAFETY: Envoy waits for this call.
            unsafe { done(context) };
        }
    }
}

// === hooks of the HTTP filter ===

hooks! {
    fn http_filter_config_new(_envoy: Ptr, name: Buffer, config: Buffer) -> Object {
        created(|| StreamConfig::open(name.bytes(), config.bytes(), process()))
    }

    fn http_filter_config_destroy(config: Object) {
        destroyed::<StreamConfig>(config);
    }

    fn http_filter_new(config: Object, _envoy: Ptr) -> Object {
        // SAFETY: `config_new` made it.
        created(|| Ok(unsafe { &*config.cast::<StreamConfig>() }.filter()))
    }

    fn http_filter_destroy(filter: Object) {
        destroyed::<Box<dyn StreamFilter>>(filter);
    }

    fn http_filter_scheduled(envoy: Ptr, filter: Object, _event: u64) {
        // SAFETY: as in `in_stream`.
        let held = guarded(false, || unsafe { &**filter.cast::<Box<dyn StreamFilter>>() }.holds());
        let flow = in_stream(envoy, filter, |filter, envoy| filter.scheduled(envoy));
        if held && flow == Flow::Continue {
            Envoy(envoy).continue_request();
        }
    }

    fn http_filter_stream_complete(envoy: Ptr, filter: Object) {
        in_stream(envoy, filter, |filter, _| {
            filter.complete();
            Flow::Continue
        });
    }
}

/// Hooks with a part of a stream: the function of [`StreamFilter`], and the function of [`Flow`] for its status.
macro_rules! stream_hooks {
    ($($name:ident($($end:ident)?) => $hook:ident -> $status:ident;)*) => {
        hooks! {
            $(fn $name(envoy: Ptr, filter: Object $(, $end: bool)?) -> u32 {
                in_stream(envoy, filter, |filter, envoy| filter.$hook(envoy $(, $end)?)).$status()
            })*
        }
    };
}

stream_hooks! {
    http_filter_request_headers(end) => request_headers -> headers_status;
    http_filter_request_body(end) => request_body -> body_status;
    http_filter_request_trailers() => request_trailers -> headers_status;
    http_filter_response_headers(end) => response_headers -> headers_status;
    http_filter_response_body(end) => response_body -> body_status;
    http_filter_response_trailers() => response_trailers -> headers_status;
}

// === hooks of the cluster ===

hooks! {
    fn cluster_config_new(_envoy: Ptr, _name: Buffer, config: Buffer) -> Object {
        created(|| ClusterConfig::open(&settings::read(config.bytes())?, process()))
    }

    fn cluster_config_destroy(config: Object) {
        destroyed::<ClusterConfig>(config);
    }

    fn cluster_new(config: Object, _envoy: Ptr) -> Object {
        // SAFETY: `config_new` made it.
        created(|| Ok(Cluster::new(unsafe { &*config.cast::<ClusterConfig>() })))
    }

    fn cluster_destroy(cluster: Object) {
        destroyed::<Cluster>(cluster);
    }

    fn cluster_init(envoy: Ptr, cluster: Object) {
        let (commit, delete) = (cluster_scheduler_commit, cluster_scheduler_delete);
        let scheduler = Scheduler { object: ask!(cluster_scheduler_new(envoy)), commit, delete };
        // SAFETY: `created` made the cluster, and only the main thread uses it.
        let cluster = unsafe { &*cluster.cast::<Cluster>() };
        guarded((), || cluster.start(&EnvoyCluster(envoy), move || scheduler.schedule()));
    }

    fn cluster_scheduled(envoy: Ptr, cluster: Object, _event: u64) {
        // SAFETY: as above.
        guarded((), || unsafe { &*cluster.cast::<Cluster>() }.apply(&EnvoyCluster(envoy)));
    }
}

/// Hooks that Envoy requires, of functions that the module does not use.
macro_rules! unused_hooks {
    ($($name:ident($($argument:ty),*) $(-> $result:ty = $value:expr)?;)*) => {
        hooks! { $(fn $name($(_: $argument),*) $(-> $result)? { $($value)? })* }
    };
}

unused_hooks! {
    bootstrap_extension_destroy(Object);
    bootstrap_extension_server_initialized(Ptr, Object);
    bootstrap_extension_worker_thread_initialized(Ptr, Object);
    bootstrap_extension_drain_started(Ptr, Object);
    bootstrap_extension_http_callout_done(Ptr, Object, u64, u32, *const Pair, usize, *const Buffer, usize);
    bootstrap_extension_timer_fired(Ptr, Object, Ptr);
    bootstrap_extension_file_changed(Ptr, Object, Buffer, u32);
    bootstrap_extension_cluster_add_or_update(Ptr, Object, Buffer);
    bootstrap_extension_cluster_removal(Ptr, Object, Buffer);
    bootstrap_extension_listener_add_or_update(Ptr, Object, Buffer);
    bootstrap_extension_listener_removal(Ptr, Object, Buffer);
    // Envoy's own policies choose. With `CLUSTER_PROVIDED`, requests get 503.
    cluster_lb_new(Object, Ptr) -> Object = null();
    cluster_lb_destroy(Object);
    cluster_lb_choose_host(Object, Ptr, *mut Ptr, *mut Ptr);
    http_filter_http_callout_done(Ptr, Object, u64, u32, *mut Pair, usize, *mut Buffer, usize);
    http_filter_http_stream_headers(Ptr, Object, u64, *mut Pair, usize, bool);
    http_filter_http_stream_data(Ptr, Object, u64, *const Buffer, usize, bool);
    http_filter_http_stream_trailers(Ptr, Object, u64, *mut Pair, usize);
    http_filter_http_stream_complete(Ptr, Object, u64);
    http_filter_http_stream_reset(Ptr, Object, u64, u32);
    http_filter_downstream_above_write_buffer_high_watermark(Ptr, Object);
    http_filter_downstream_below_write_buffer_low_watermark(Ptr, Object);
}
